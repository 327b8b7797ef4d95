"""Detection of lines of the package that only CUDA runs, for cuda_lines.py."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_freescale"

CONDITIONS = {
    "_runtime/object_gather.py": {"'cpu' in dist.get_backend_config(group)": False},
    "_runtime/worker.py": {"device is not None": True, "torch.cuda.is_initialized()": True},
    "comm/collectives/native.py": {
        "on_gpu and (not self._shown)": True,
        "on_gpu": True,
        "any(map(_is_on_gpu, args))": True,
        "self.nccl is not None": True,
    },
    "comm/process_group.py": {
        "torch.cuda.is_available()": True,
        "options.transport == 'auto' and auto_candidates(self._executor.topology)": True,
        "self.moves_by_nccl and self._backends.nccl is None": True,
        "self.moves_by_nccl": True,
    },
    "comm/rank_notices.py": {"dist.get_backend() == 'nccl'": True},
    "comm/transports/host.py": {"self._staging is not None": True, "self._staging is None": False, "ahead.copy is None": False},
    "comm/transports/topology.py": {"not used or not torch.cuda.is_available()": False},
    "embeddings/id_prediction.py": {"self._copied": False},
    "embeddings/overlap/transport.py": {"self._stream is not None": True, "self._stream is None": False},
    "embeddings/overlap/id_exchange.py": {"self._apart": True},
    "embeddings/overlap/row_requests.py": {"keys.is_cuda or key_bits + place_bits > 63": True},
    "fabric/strategy.py": {"self._steps is not None and self._steps.step.early_copy is not None": True},
    "training/table_step.py": {"self.early_copy is None": False},
}
"""Conditions that tell of CUDA by other words, and their value there."""

FUNCTIONS = {
    "comm/collectives/native.py": {
        "NativeBackends.hiding_nccl": "a trial of transports for CUDA tensors calls it",
        "NativeBackends.register_nccl": "NCCL moves CUDA tensors",
        "NativeBackends._make_nccl": "as register_nccl",
    },
    "comm/collectives/eager_exchange.py": {"exchange_with_sizes": "ProcessGroupFreeScale.exchange calls it with CUDA tensors"},
    "comm/transports/selection.py": {"build_transport": "transports between GPUs"},
    "comm/transports/topology.py": {"_uuid": "of a GPU", "_linked_devices": "of a GPU"},
    "comm/transports/host.py": {
        "DeviceStaging": "for tensors on a GPU",
        "PinnedPool": "memory of DeviceStaging",
        "HostCopy.is_ready": "asks the event of a copy from a GPU",
    },
    "embeddings/id_checks.py": {"LookupChecks.in_range": "check_ids calls it with CUDA tensors"},
    "embeddings/overlap/id_exchange.py": {"IdExchange._exchange_apart": "heads travel apart on CUDA"},
    "embeddings/overlap/local_rows.py": {"TableKernel.update": "CpuKernel and AdamKernel have their own"},
    "embeddings/overlap/transport.py": {"_record_stream": "ExchangeWorker.submit calls it where there is a CUDA stream"},
    "profiling/recording/records.py": {"CudaClock": "clock_for returns it for CUDA devices"},
    "profiling/recording/memory.py": {"_allocated": "memory_reader calls it for CUDA devices"},
    "profiling/reporting/kineto.py": {
        "temporal_breakdown": "of kernels on a GPU",
    },
    "training/next_ids.py": {
        "EarlyCopy.__init__": "for_device makes it for CUDA devices",
        "EarlyCopy.start": "as __init__",
        "EarlyCopy.take": "as __init__",
        "_movable": "EarlyCopy.start calls it",
    },
}
"""Functions, and classes with all of theirs, that run on CUDA alone, with the reason."""

ON_CPU_AS_WELL = {
    "comm/collectives/native.py": {"torch.cuda.is_available()": "asks whether there is CUDA"},
    "comm/process_group.py": {"torch.cuda.is_available()": "asks whether there is CUDA"},
    "comm/transports/topology.py": {"torch.cuda.is_": "asks whether there is CUDA"},
    "_runtime/worker.py": {"torch.cuda.is_initialized()": "asks whether there is CUDA"},
}
"""What names CUDA in a line that every device runs, with the reason."""

FILES = {
    "comm/collectives/auto_transport.py": "lanes without GPUs try nothing",
    "comm/transports/cuda_driver.py": "the driver of a GPU",
    "comm/transports/nccl.py": "NCCL moves CUDA tensors",
    "comm/transports/peer_link.py": "copies between GPUs",
    "comm/transports/peer.py": "copies between GPUs",
}
"""Files whose functions run on CUDA alone, with the reason."""

_OF_STREAMS = ("elapsed_time", "record_event", "record_stream", "wait_event", "wait_stream")


@dataclass
class CudaLines:
    """The lines of a file that only CUDA runs.

    Attributes:
        spans: first and last lines of statements.
        arms: arms of ``a if condition else b``.
    """

    spans: list[tuple[int, int]] = field(default_factory=list)
    arms: list[ast.expr] = field(default_factory=list)

    def holds(self, line: int) -> bool:
        """Return True if the line is a CUDA line."""
        return any(first <= line <= last for first, last in self.spans)


def find_cuda_lines(name: str, tree: ast.Module) -> CudaLines:
    """Find the CUDA lines of file ``name`` of the package.

    Raises:
        LookupError: the file does not contain a function or condition that is listed for it.
    """
    functions, conditions = FUNCTIONS.get(name, {}), CONDITIONS.get(name, {})
    defined = dict(_definitions(tree))
    expressions = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.expr)}
    if missing := [*(functions.keys() - defined.keys()), *(conditions.keys() - expressions)]:
        raise LookupError(f"{name} has no {missing}: correct the lists of {Path(__file__).name}")
    bodies = [defined[function].body for function in functions]
    if name in FILES:
        bodies += [node.body for node in defined.values() if isinstance(node, ast.FunctionDef)]
    found = CudaLines([span for body in bodies for span in _spans(body)])
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            arms = {True: node.body, False: node.orelse}
            found.arms += [arms[value] for value in _cuda_values(node.test, conditions) if not _is_constant(arms[value])]
        for block in (getattr(node, part, None) for part in ("body", "orelse", "finalbody")):
            for index, each in enumerate(block if isinstance(block, list) else ()):
                if isinstance(each, ast.If):
                    found.spans += _spans(_cuda_branch(each, block[index + 1 :], conditions))
    return found


def unclassified(name: str, tree: ast.Module) -> dict[int, str]:
    """Return, by line, the names of CUDA in lines that seem to run on all devices and are not listed."""
    found, known = find_cuda_lines(name, tree), ON_CPU_AS_WELL.get(name, {})
    arms = {id(inner) for arm in found.arms for inner in ast.walk(arm)}
    named = [node for node in ast.walk(tree) if _names_cuda(node) and id(node) not in arms and not found.holds(node.lineno)]
    unsaid = [node for node in named if not any(text in ast.unparse(_statement(tree, node)) for text in known)]
    return {node.lineno: ast.unparse(node) for node in unsaid}


def _definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + node.name, node
            yield from _definitions(node, f"{prefix}{node.name}.")


def _spans(statements: Iterable[ast.stmt]) -> list[tuple[int, int]]:
    return [(each.lineno, each.end_lineno or each.lineno) for each in statements]


def _cuda_branch(node: ast.If, rest: list[ast.stmt], conditions: Mapping[str, bool]) -> list[ast.stmt]:
    """Return the statements that only CUDA reaches because of an ``if``; ``rest`` follows the ``if`` in its block."""
    values = _cuda_values(node.test, conditions)
    if True in values:
        return node.body
    if False in values:
        ends = isinstance(node.body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))
        return node.orelse or (rest if ends else [])
    return []


def _cuda_values(test: ast.expr, conditions: Mapping[str, bool]) -> set[bool]:
    """Return the values that a condition has only on CUDA."""
    if (value := conditions.get(ast.unparse(test))) is not None:
        return {value}
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return {not value for value in _cuda_values(test.operand, conditions)}
    if isinstance(test, ast.BoolOp):
        parts = [_cuda_values(part, conditions) for part in test.values]
        decisive = isinstance(test.op, ast.And)  # one part decides that a conjunction is true, all that it is false
        return {value for value in (True, False) if (any if value == decisive else all)(value in part for part in parts)}
    if isinstance(test, ast.Attribute) and test.attr in ("is_cuda", "is_cpu"):
        return {test.attr == "is_cuda"}
    if isinstance(test, ast.Compare) and isinstance(test.left, ast.Attribute) and test.left.attr == "type":
        kind = test.comparators[0]
        if isinstance(kind, ast.Constant) and kind.value in ("cuda", "cpu"):
            return {isinstance(test.ops[0], ast.Eq) == (kind.value == "cuda")}
    return set()


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, (ast.Tuple, ast.List)) and not node.elts)


def _names_cuda(node: ast.AST) -> bool:
    """Return True if a node names ``torch.cuda`` or a method of streams and events."""
    if not isinstance(node, ast.Attribute):
        return False
    in_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
    return node.attr in _OF_STREAMS or (in_torch and node.attr in ("cuda", "Stream", "Event"))


def _statement(tree: ast.Module, node: Any) -> ast.AST:
    """Return the innermost statement that contains a node."""
    around = [each for each in ast.walk(tree) if isinstance(each, ast.stmt) and each.lineno <= node.lineno <= each.end_lineno]
    return max(around, key=lambda each: each.lineno)


def package_files() -> Iterator[tuple[str, Path]]:
    """Yield the files of the package whose CUDA lines count, with their paths in the package."""
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        name = str(path.relative_to(ROOT / PACKAGE))
        yield name, path
