"""Base classes of strategies for the Trainer and for Fabric: DDP strategies with public names for private state."""

from __future__ import annotations

import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric import strategies as fabric_strategies
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities import imports
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import _TunerExitException
from torch import nn
from typing_extensions import override

from lightning_freescale._lightning.loops import Trainer, optimizers_to_device
from lightning_freescale._lightning.stop_points import SIGTERMException
from lightning_freescale._runtime.attributes import replaced
from lightning_freescale._runtime.code_place import place_in_code
from lightning_freescale._runtime.error_text import error_text
from lightning_freescale.comm.attempt_store import attempt_store, has_torchrun_store
from lightning_freescale.comm.rank_notices import RankNotices, notices_of_ranks
from lightning_freescale.comm.waits import naming_missing_ranks, until_another_fails

GROUP_TIMEOUT = timedelta(minutes=5)
"""The timeout of all groups but the default one, if the user sets none. They wait for a step or for a part of a checkpoint.
The default group also waits for slow set-up and loading, and keeps Lightning's timeout."""


_NOTICES: weakref.WeakSet[RankNotices] = weakref.WeakSet()  # of all strategies for Fabric


class _OptionsOfDDP:
    cluster_environment: ClusterEnvironment | None
    _ddp_kwargs: dict[str, Any]
    _start_method: Any

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.group_timeout: timedelta = options.get("timeout") or GROUP_TIMEOUT
        self.at_teardown = ExitStack()  # closed by the subclass that overrides teardown

    def setup_environment(self) -> None:
        """Create the default process group, and explain NCCL's error about several ranks on one GPU."""
        try:
            with naming_missing_ranks(self.cluster_environment):
                super().setup_environment()  # type: ignore[misc]
        except RuntimeError as error:
            if "Duplicate GPU detected" not in str(error):
                raise
            raise RuntimeError(
                f"several ranks run on one GPU, which NCCL does not support. Pass {type(self).__name__}("
                'process_group_backend="gloo"), or use one GPU for each rank'
            ) from error

    @property
    def unsupported_options(self) -> tuple[str, int | None]:
        """The options ``start_method`` and ``model_averaging_period``."""
        return self._start_method, getattr(self, "_model_averaging_period", None)

    @property
    def ddp_options(self) -> dict[str, Any]:
        return self._ddp_kwargs


class DDPBase(_OptionsOfDDP, DDPStrategy):
    """Base class of strategies for the Trainer that shard, wrap and restore the module themselves."""

    @override
    def setup_distributed(self) -> None:
        self.set_world_ranks()
        create_for_attempt(self)
        super().setup_distributed()

    def apply_layer_sync(self, module: nn.Module) -> None:
        """Replace batch norms by synchronized ones, in place, if ``Trainer(sync_batchnorm=True)`` is set."""
        if self._layer_sync:
            self._layer_sync.apply(module)

    def register_ddp_hooks(self) -> None:
        """Register the user's communication hook on ``self.model``, a DistributedDataParallel."""
        self._register_ddp_hooks()

    def tear_down_but_module(self, layers_synced: bool) -> None:
        """Tear down like the base class, but do not move the module. Restore its own batch norms.

        The base class moves the whole module to the CPU, which breaks shards in FBGEMM's kernels.
        """
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        self.model = self.lightning_module
        if self.model is not None and layers_synced and self._layer_sync:
            self.model = self._layer_sync.revert(self.model)
        optimizers_to_device(self.optimizers, torch.device("cpu"))
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        ranks = self.num_processes * self.num_nodes
        if imports._IS_INTERACTIVE and ranks > 1 and not self.cluster_environment.creates_processes_externally:
            raise RuntimeError(
                f"strategy 'freescale' cannot start {ranks} ranks in a notebook or another interactive session. Run a script "
                "(in a notebook by %%writefile train.py and !python train.py), or pass Trainer(devices=1)"
            )
        super()._configure_launcher()
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            self._launcher = _Launcher(self)

    def check_before_launch(self, trainer: Trainer) -> None:
        """Raise an error for a run that is not supported, before processes are started."""

    def ended_by(self, error: BaseException) -> BaseException:
        """Return the exception that ends the run on this rank after ``error``. Callbacks receive it."""
        return error


class _Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher, which also checks the run, runs a single process in a notebook, and adds reasons to errors."""

    def __init__(self, strategy: DDPBase) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        assert trainer is not None
        self._strategy.check_before_launch(trainer)
        if imports._IS_INTERACTIVE:  # there is no process to start, and variables would tell later runs that there was one
            return self._run(trainer, function, *args, **kwargs)
        return super().launch(partial(self._run, trainer, function), *args, trainer=trainer, **kwargs)

    def _run(self, trainer: Trainer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except _TunerExitException:  # the regular end of a tuner's run
            raise
        except BaseException as error:
            reason = self._strategy.ended_by(error)
            self._strategy.at_teardown.enter_context(_outlived_hooks(trainer))
            if isinstance(reason, SIGTERMException):
                self.procs.clear()  # otherwise Lightning kills this process after one that it has started has ended
            if reason is error:
                raise
            raise reason from error


@contextmanager
def _outlived_hooks(trainer: Trainer) -> Iterator[None]:
    """Make an error in a hook that Lightning calls after an error a warning. Otherwise Lightning would not tear down."""

    def outlived(hook: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> None:
        try:
            hook(*args, **kwargs)
        except Exception as error:
            place = place_in_code(traceback.extract_tb(error.__traceback__))
            warnings.warn(
                f"rank {trainer.global_rank}: {type(owner).__name__}.{hook.__name__} has failed, too, after the error that "
                f"ends this run: {error_text(error)}, in {place}",
                stacklevel=2,
            )

    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    handling = [(owner, "on_exception") for owner in (*callbacks, getattr(trainer, "datamodule", None), trainer.strategy)]
    handling += [(logger, "finalize") for logger in trainer.loggers]
    with ExitStack() as stack:
        for owner, name in handling:
            if owner is not None:
                stack.enter_context(replaced(owner, {name: partial(outlived, getattr(owner, name), owner)}))
        yield


class FabricDDPBase(_OptionsOfDDP, fabric_strategies.DDPStrategy):
    """Base class of strategies for Fabric that shard and wrap the module themselves."""

    _notices: RankNotices | None = None

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._close_notices()
        self._notices = notices = notices_of_ranks(self.group_timeout)
        if notices is not None:
            # nothing here may keep the strategy, because a loop over Fabric has no end
            weakref.finalize(self, notices.close).atexit = False
            _NOTICES.add(notices)
            if getattr(sys.excepthook, "func", None) is not _report_and_print:
                sys.excepthook = partial(_report_and_print, sys.excepthook)

    @override
    def teardown(self) -> None:
        self._close_notices()
        super().teardown()

    def _close_notices(self) -> None:
        if self._notices is not None:
            self._notices.close()
            self._notices = None

    @contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Report an error in the block to the other ranks. If another rank caused it, add that rank and its error."""
        try:
            yield
        except BaseException as error:
            if self._notices is not None:
                self._notices.tell_or_explain(error)
            raise

    @property
    def ddp_device_ids(self) -> list[int] | None:
        """The ``device_ids`` of DistributedDataParallel."""
        return self._determine_ddp_device_ids()

    @property
    def updates_unscaled(self) -> bool:
        """Whether the precision keeps losses, gradients and parameters unchanged: float32, or bfloat16 by autocast."""
        precision = self.precision
        scales = isinstance(precision, MixedPrecision) and precision.scaler is not None
        return precision.precision in ("32-true", "bf16-mixed") and not scales

    @override
    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        create_for_attempt(self)
        super()._setup_distributed()

    def block_backward_sync(self, blocked: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
        """Make ``fabric.no_backward_sync`` enter ``blocked(module)``, where ``module`` is wrapped by DDP."""

        def no_backward_sync(module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
            return blocked(module) if enabled else nullcontext()

        self._backward_sync_control: Any = SimpleNamespace(no_backward_sync=no_backward_sync)


def _report_and_print(print_error: Callable[..., Any], kind: Any, error: BaseException, *trace: Any) -> None:
    """Report an uncaught error of a loop over Fabric to the other ranks."""
    for notices in list(_NOTICES):
        notices.tell_or_explain(error)
    print_error(kind, error, *trace)


def new_gloo_group(timeout: timedelta | None) -> dist.ProcessGroup:
    """Create a gloo group of all ranks, or raise a DistBackendError if another rank fails meanwhile. Collective."""
    return cast("dist.ProcessGroup", until_another_fails(partial(dist.new_group, backend="gloo", timeout=timeout)))


def process_group_timeout(strategy: Strategy) -> timedelta | None:
    """Return the timeout of all process groups but the default one; None if the strategy has none."""
    own: timedelta | None = getattr(strategy, "group_timeout", None)
    return own or getattr(strategy, "_timeout", None)


def create_for_attempt(strategy: Any) -> None:
    """Create the default process group in a store of its own if torchrun provides one store for all attempts.

    Otherwise do nothing, because Lightning creates the group.
    """
    environment, device = strategy.cluster_environment, strategy.root_device
    if environment is None or dist.is_initialized() or not has_torchrun_store():
        return
    timeout, ranks = strategy._timeout or dist.default_pg_timeout, environment.world_size()
    store = attempt_store(environment.main_address, environment.main_port, environment.global_rank(), ranks, timeout)
    bound = None if device.type == "cpu" else device
    backend = strategy._get_process_group_backend()
    _init_dist_connection(environment, backend, store=store, timeout=timeout, device_id=bound)
