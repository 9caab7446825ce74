"""What cannot work is refused in one clear sentence before any weight loads."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import GPUS
from tests.helpers.engine import CPU_SETTINGS, MODEL
from vllm_mtp import compat
from vllm_mtp.config import SettingsError


def configure(speculative: dict[str, Any], **settings: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    known = {k: v for k, v in CPU_SETTINGS.items() if k != "disable_log_stats"}
    args = EngineArgs(
        **{"model": str(MODEL), **known, **settings}, speculative_config=speculative
    )
    return args, args.create_engine_config()


def tiny_copy(target: Path, **config: Any) -> str:
    """The tiny model's folder with another config."""
    shutil.copytree(MODEL, target)
    fields = json.loads((target / "config.json").read_text())
    for key, value in config.items():
        if value is None:
            fields.pop(key)
        else:
            fields[key] = value
    (target / "config.json").write_text(json.dumps(fields))
    return str(target)


def test_the_option_becomes_mtp_with_a_worker_of_ours() -> None:
    args, config = configure({"method": "mtp_tree", "topk": 2})
    assert config.speculative_config.method == "mtp"
    assert config.speculative_config.num_speculative_tokens == 7
    assert config.parallel_config.worker_cls == compat.CPU_WORKER
    assert compat.read_config(config).shape.topk == 2
    # The user's words are still there, for a second call.
    assert args.speculative_config == {"method": "mtp_tree", "topk": 2}


@pytest.mark.parametrize("given", [{}, {"shape": None}])
def test_beside_another_scheduler_the_shape_is_fixed(given: dict[str, Any]) -> None:
    own = "vllm.v1.core.sched.scheduler.Scheduler"
    _, config = configure({"method": "mtp_tree", **given}, scheduler_cls=own)
    assert not compat.read_config(config).auto
    assert config.scheduler_config.scheduler_cls == own
    with pytest.raises(SettingsError, match="Remove either"):
        configure({"method": "mtp_tree", "shape": "auto"}, scheduler_cls=own)


def test_short_flags_ask_for_it_too() -> None:
    _, config = configure(None, spec_method="mtp_tree", spec_tokens=3)  # type: ignore[arg-type]
    assert compat.read_config(config).shape.num_nodes == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not supported"),
        ({"data_parallel_size": 2}, "data_parallel_size=2 is not supported"),
        ({"worker_cls": "my.Worker"}, "Remove --worker-cls"),
        ({"return_sampling_mask": True}, "return_sampling_mask is not supported"),
    ],
)
def test_unsupported_parallelism(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        configure({"method": "mtp_tree"}, **settings)


@pytest.mark.parametrize("count", [0, None])
def test_a_target_without_mtp_layer(tmp_path: Path, count: int | None) -> None:
    model = tiny_copy(tmp_path / "m", num_nextn_predict_layers=count)
    with pytest.raises(SettingsError, match="MTP layer"):
        configure({"method": "mtp_tree"}, model=model)


def test_several_mtp_layers(tmp_path: Path) -> None:
    model = tiny_copy(tmp_path / "m", num_nextn_predict_layers=2)
    with pytest.raises(SettingsError, match="num_nextn_predict_layers"):
        configure({"method": "mtp_tree"}, model=model)


@pytest.mark.parametrize("found", ["0.31.2", "0.34.0", None])
def test_an_unsupported_vllm_is_refused_only_when_asked_for(
    found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: found)
    configure({"method": "mtp", "num_speculative_tokens": 2})
    with pytest.raises(SettingsError, match=r"works with vLLM 0\.32\.x and 0\.33\.x"):
        configure({"method": "mtp_tree"})


@pytest.mark.skipif(GPUS > 0, reason="kernels are compiled where there is a GPU")
@pytest.mark.parametrize("value", [None, "0"])
def test_a_cpu_whose_kernels_are_not_interpreted(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: an AttributeError from inside a kernel's module."""
    monkeypatch.delenv("TRITON_INTERPRET")
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    configure({"method": "mtp", "num_speculative_tokens": 2})
    words = f"TRITON_INTERPRET is {value or 'not set'}.* Set TRITON_INTERPRET=1"
    with pytest.raises(SettingsError, match=words):
        configure({"method": "mtp_tree"})


def test_a_backend_that_knows_no_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: wrong tokens from a backend that takes tree rows for a chain."""
    from tests.e2e.test_ids import mtp_tree
    from tests.helpers.engine import engine

    monkeypatch.setattr(compat, "install_backends", lambda paths: None)
    with (
        pytest.raises(Exception, match="CPU_MLA cannot attend to trees"),
        engine(mtp_tree(2, 2, 3)),
    ):
        pass
