"""Checkpoints outside of a run: one file of a folder and back, the plain module, and what has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_freescale import FreeScaleDataModule, FreeScaleStrategy
from lightning_freescale.checkpoint import conversion
from lightning_freescale.command_line.main import main
from lightning_freescale.testing import run_distributed
from tests.helpers.recommender import REPEATS, Recommender, Samples, StopAt, collate, trainer

TABLE = "net.embeddings.embeddings.item.weight"


class Large(Recommender):
    """Its table is a tensor of its own in any folder."""

    def __init__(self) -> None:
        from torchrec import EmbeddingCollection, EmbeddingConfig

        super().__init__("rowwise_adagrad")
        rows = {"item": 40_000, "cat": 13}
        of = {"item": ["history", "candidate"], "cat": ["category"]}
        self.net.embeddings = EmbeddingCollection(
            tables=[EmbeddingConfig(name=n, num_embeddings=rows[n], embedding_dim=8, feature_names=of[n]) for n in rows]
        )


def _fit(ranks: int, stop: Path | None = None, resume: Path | None = None, step: int = 4, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    data, module = Samples(72), Large()
    loader = FreeScaleDataModule(data, data.lengths, 12 // ranks, collate_fn=collate, balance=REPEATS)
    callbacks = [] if stop is None else [StopAt(step, str(stop))]
    fit = trainer(devices=ranks, max_epochs=2, callbacks=callbacks, strategy=FreeScaleStrategy(**options))
    fit.fit(module, loader, ckpt_path=resume)
    return {"losses": module.losses, "weights": fit._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for step in (4, 5):
        for checkpoint in ("single", "sharded"):
            run_distributed(_fit, 2, 2, folder / f"{checkpoint}{step}.ckpt", step=step, checkpoint=checkpoint)
    return folder


@pytest.mark.parametrize("there_and_back", [False, True])
def test_one_file_of_a_folder_is_what_a_single_one_would_be(saved: Path, tmp_path: Path, there_and_back: bool) -> None:
    single, source = tmp_path / "single.ckpt", saved / "sharded4.ckpt"
    if there_and_back:
        source = tmp_path / "sharded.ckpt"
        main(["consolidate", str(saved / "single4.ckpt"), str(source), "--to", "sharded"])
        assert list(source.glob("*.distcp")), "the tables are in files of their own"
        assert (source / "meta.pt").stat().st_size < 500_000
    main(["consolidate", str(source), str(single), "--to", "single"])
    expected = torch.load(saved / "single4.ckpt", weights_only=True)
    found = torch.load(single, weights_only=True)
    assert found.keys() == expected.keys()
    for part in ("state_dict", "optimizer_states", "loops"):
        torch.testing.assert_close(found[part], expected[part], rtol=0, atol=0)


def test_a_run_resumes_from_a_converted_one(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "sharded.ckpt"
    conversion.write_folder(conversion.read_checkpoint(saved / "single4.ckpt"), path)
    from_either = [run_distributed(_fit, 2, 2, resume=each)[0] for each in (saved / "single4.ckpt", path)]
    assert from_either[0]["losses"] == from_either[1]["losses"]
    torch.testing.assert_close(from_either[1]["weights"], from_either[0]["weights"], rtol=0, atol=0)


@pytest.mark.parametrize("checkpoint", ["single4.ckpt", "sharded4.ckpt"])
def test_the_plain_module_loads_it(checkpoint: str, saved: Path, tmp_path: Path) -> None:
    expected = torch.load(saved / "single4.ckpt", weights_only=True)["state_dict"]
    with conversion.open_checkpoint(saved / checkpoint) as file:
        module = Large.load_from_checkpoint(file)
    torch.testing.assert_close(dict(module.state_dict()), dict(expected), rtol=0, atol=0)
    main(["consolidate", str(saved / checkpoint), str(tmp_path / "weights.pt")])
    Large().load_state_dict(torch.load(tmp_path / "weights.pt"))


def _opened_by_one(path: Path) -> list[torch.Size]:
    import torch.distributed as dist

    shapes = []
    if dist.get_rank() == 0:  # such as after a fit, to export it
        with conversion.open_checkpoint(path) as file:
            shapes = [weight.shape for weight in Large.load_from_checkpoint(file).state_dict().values()]
    dist.barrier()
    return shapes


def test_one_rank_of_a_run_opens_a_folder_alone(saved: Path) -> None:
    shapes = run_distributed(_opened_by_one, 2, saved / "sharded4.ckpt", timeout=60)
    assert shapes[0] and not shapes[1]


def _predict(path: Path) -> torch.Tensor:
    data = Samples(24)
    loader = FreeScaleDataModule(data, data.lengths, 4, collate_fn=collate, predict_dataset=data, balance=REPEATS)
    fit = trainer(devices=1, strategy="freescale")
    return torch.cat(fit.predict(Large(), loader, ckpt_path=path))


def test_one_process_predicts_with_either(saved: Path) -> None:
    single, sharded = (run_distributed(_predict, 1, saved / f"{kind}4.ckpt")[0] for kind in ("single", "sharded"))
    assert torch.equal(single, sharded)


@pytest.mark.parametrize("old", ["single4.ckpt", "sharded4.ckpt"])
@pytest.mark.parametrize("new", ["single5.ckpt", "sharded5.ckpt"])
def test_changes_are_the_rows_that_a_step_has_updated(old: str, new: str, saved: Path, tmp_path: Path) -> None:
    main(["changes", str(saved / old), str(saved / new), str(tmp_path / "changes.pt")])
    changes = torch.load(tmp_path / "changes.pt", weights_only=True)
    before, after = (torch.load(saved / f"single{step}.ckpt", weights_only=True)["state_dict"] for step in (4, 5))
    assert 0 < len(changes[TABLE]["ids"]) < 1000, "most rows have not changed"
    for name, changed in changes.items():
        before[name][changed["ids"]] = changed["rows"]
    assert all(torch.equal(before[name], after[name]) for name in after)
    assert torch.equal(changes[TABLE]["ids"], changes[TABLE]["ids"].unique())


def test_changes_of_another_module_are_refused(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": {TABLE: torch.zeros(3, 2)}}, tmp_path / "other.ckpt")
    with pytest.raises(SystemExit):
        main(["changes", str(saved / "single4.ckpt"), str(tmp_path / "other.ckpt"), str(tmp_path / "changes.pt")])
    assert "of different modules" in capsys.readouterr().err
