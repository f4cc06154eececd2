"""Files of an adapter: its base by a path that other machines share, the identity, the copy that vLLM reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine import adapter_files
from engine.policy_files import describe_files, is_intact, link_version, publish_adapter, weight_files, whole_model
from engine.process import EngineSettings, vllm_command
from engine.vllm_plugin import checked_paths
from ratchet.errors import ConfigError
from ratchet.types import MODEL_NAME


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root of policies with a base, `run/0.e0`, and an adapter on it, `run/1.e1`."""
    import torch
    from safetensors.torch import save_file

    base = tmp_path / "policies" / "run" / "0.e0"
    base.mkdir(parents=True)
    save_file({"weight": torch.ones(4, 4)}, base / "model.safetensors")
    (base / "config.json").write_text("{}")
    state = {"base_model.model.q_proj.lora_A.weight": torch.ones(2, 4)}
    files = weight_files(describe_files(base))
    publish_adapter(state, {"r": 2}, base, files, base.parent / "1.e1")
    return tmp_path / "policies"


def test_the_base_is_found_wherever_the_root_is_mounted(root: Path, tmp_path: Path) -> None:
    files = describe_files(root / "run" / "1.e1")
    elsewhere = root.rename(tmp_path / "elsewhere")
    base = adapter_files.read_base(elsewhere / "run" / "1.e1")
    assert base.directory == (elsewhere / "run" / "0.e0").resolve()
    assert [file["name"] for file in base.files] == ["model.safetensors"]
    assert whole_model(elsewhere / "run" / "1.e1") == base.directory
    assert whole_model(base.directory) == base.directory
    assert is_intact(elsewhere / "run" / "1.e1", files)
    (base.directory / "model.safetensors").write_bytes(b"others")
    assert not is_intact(elsewhere / "run" / "1.e1", files)


def test_an_engine_reads_all_files_of_an_adapter_and_checks_them(root: Path) -> None:
    files = describe_files(root / "run" / "1.e1")
    names = [f"run/1.e1/{file['name']}" for file in weight_files(files)]
    assert adapter_files.is_adapter(names) and not adapter_files.is_adapter(["run/0.e0/model.safetensors"])
    paths = checked_paths(root, names, [file["sha256"] for file in files])
    assert {path.name for path in paths} == {adapter_files.CONFIG, adapter_files.WEIGHTS, adapter_files.BASE}
    with pytest.raises(ValueError, match="no weight was changed"):
        checked_paths(root, names, ["00" * 32] * len(names))


def test_the_served_directory_has_the_identity_and_then_the_adapter(root: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    served = tmp_path / "served"
    adapter_files.write_identity_adapter(served, 8)
    assert adapter_files.adapter_rank(served) == 8
    assert all(not tensor.any() for tensor in load_file(served / adapter_files.WEIGHTS).values())
    adapter_files.place_adapter(list((root / "run" / "1.e1").iterdir()), served)
    assert {path.name for path in served.iterdir()} == {adapter_files.CONFIG, adapter_files.WEIGHTS}
    for name in (adapter_files.CONFIG, adapter_files.WEIGHTS):
        assert (served / name).read_bytes() == (root / "run" / "1.e1" / name).read_bytes()


@pytest.mark.parametrize("content", ["{}", "[]", "not json"])
def test_an_unreadable_base_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / adapter_files.BASE).write_text(content)
    with pytest.raises(ValueError):
        adapter_files.read_base(tmp_path)


def engine_settings(home: Path, **values: Any) -> EngineSettings:
    places = {"model_path": home, "state_dir": home, "policies_root": home}
    return EngineSettings.model_validate({"port": 1, "database_url": "", **places, **values})


@pytest.mark.parametrize(("rank", "served"), [(None, None), (1, "8"), (16, "16"), (17, "32"), (512, "512")])
def test_calls_name_the_same_model_with_an_adapter_and_without(
    tmp_path: Path, rank: int | None, served: str | None
) -> None:
    settings = engine_settings(tmp_path, lora_rank=rank)
    command = vllm_command(settings, tmp_path)
    names = command[command.index("--served-model-name") + 1]
    if served is None:
        assert names == MODEL_NAME and "--enable-lora" not in command and settings.adapter is None
    else:
        assert names == adapter_files.BASE_NAME
        assert command[command.index("--max-lora-rank") + 1] == served
        assert command[command.index("--lora-modules") + 1] == f"{MODEL_NAME}={settings.adapter}"


def test_an_engine_that_runs_share_names_a_directory_per_slot(tmp_path: Path) -> None:
    settings = engine_settings(tmp_path, lora_rank=8, lora_runs=3)
    command = vllm_command(settings, tmp_path)
    assert command[command.index("--max-loras") + 1] == "3"
    at = command.index("--lora-modules") + 1
    names = dict(one.split("=") for one in command[at : at + 3])
    assert list(names) == [MODEL_NAME, f"{MODEL_NAME}-2", f"{MODEL_NAME}-3"]
    assert len(set(names.values())) == 3 and names[MODEL_NAME] == str(settings.adapter)
    assert {Path(one).parent for one in names.values()} == {settings.sockets}


def test_a_run_cannot_begin_with_an_adapter(root: Path) -> None:
    with pytest.raises(ConfigError, match="holds a LoRA adapter, no whole model; merge it"):
        link_version(root / "run" / "1.e1", root / "other" / "0.e0")
    assert not (root / "other").exists()


def test_the_config_is_json_that_peft_reads(root: Path) -> None:
    assert json.loads((root / "run" / "1.e1" / adapter_files.CONFIG).read_text()) == {"r": 2}
