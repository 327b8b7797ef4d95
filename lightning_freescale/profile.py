"""Entry points under the name that earlier installations registered; reinstalling the package registers the new name."""

from lightning_freescale.command_line.profiled_script import callbacks_of_run, refuse_other_trainer

__all__ = ["callbacks_of_run", "refuse_other_trainer"]
