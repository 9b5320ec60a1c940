"""The main job: `quantize` gives what the plain script gives, and finishes it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import (
    CARD_IGNORE,
    Inline,
    edit_json,
    read_tensors,
    read_tensors_of,
    reindex,
    run_plain_script,
    write_shard,
)

from kimi_k3_fp8 import Recipe, quantize, validate
from kimi_k3_fp8.checkpoint import find_quantization_configs
from kimi_k3_fp8.synthetic import write_checkpoint


def test_every_tensor_is_byte_identical_to_the_plain_scripts(plain: Path, converted: Path) -> None:
    ours, theirs = read_tensors(converted), read_tensors(plain)
    assert ours.keys() == theirs.keys()
    assert all(ours[name] == theirs[name] for name in theirs)
    assert sum(dtype == "F8_E4M3" for dtype, _, _ in ours.values()) > 40


def test_config_differs_from_the_plain_scripts_only_by_the_removed_leftover(
    plain: Path, converted: Path
) -> None:
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (converted, plain))
    assert theirs["text_config"].pop("quantization_config")
    assert ours == theirs
    assert [path for path, _ in find_quantization_configs(ours)] == ["quantization_config"]


def test_pairs_split_over_shards_give_the_same_bits(source: Path, plain: Path, tmp_path: Path) -> None:
    """Every scale moves to other shards: one of them holds only dependency tensors (TRAPS 4 and 6)."""
    scales = []
    for path in sorted(source.glob("*.safetensors")):
        held = read_tensors_of(path)
        mine = [name for name in held if name.endswith(".weight_scale")]
        scales += [(name, *held.pop(name)) for name in mine]
        write_shard(path, [(name, *value) for name, value in held.items()])
    half = len(scales) // 2
    write_shard(source / "scales.safetensors", scales[:half])
    first = sorted(source.glob("model-*.safetensors"))[0]
    write_shard(first, [(n, *v) for n, v in read_tensors_of(first).items()] + scales[half:])
    reindex(source)
    quantize(source, tmp_path / "out", max_shard_size="1MB", executor=Inline(), progress=False)
    assert read_tensors(tmp_path / "out") == read_tensors(plain)


def test_ignored_and_f32_tensors_are_byte_identical_to_the_source(tiny: Path, converted: Path) -> None:
    before, after = read_tensors(tiny), read_tensors(converted)
    kept = [
        name for name in before if name in after and after[name][0] != "F8_E4M3" and "experts." not in name
    ]
    ignored = [n for n in kept if Recipe().rule_for(n.rpartition(".")[0])]
    f32 = [n for n in before if before[n][0] == "F32"]
    assert len(ignored) > 50
    assert len(f32) > 5
    assert all(before[name] == after[name] for name in {*kept, *ignored, *f32})


def test_a_plain_bf16_copy_works_without_a_dequantizer(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "Kimi-K3", quantized_experts=False)
    report = quantize(source, tmp_path / "out", executor=Inline(), progress=False)
    from llmcompressor import model_free_ptq

    theirs = tmp_path / "plain"
    model_free_ptq(source, theirs, scheme="FP8_BLOCK", ignore=CARD_IGNORE, device="cpu")
    assert report.ok
    assert read_tensors(tmp_path / "out") == read_tensors(theirs)


def test_a_single_file_without_an_index_works(source: Path, plain: Path, tmp_path: Path) -> None:
    held = read_tensors(source)
    for path in source.glob("*.safetensors*"):
        path.unlink()
    write_shard(source / "model.safetensors", [(name, *value) for name, value in held.items()])
    quantize(source, tmp_path / "out", executor=Inline(), progress=False)
    assert read_tensors(tmp_path / "out") == read_tensors(plain)


def test_the_quantization_config_may_lie_at_top_level_or_as_compression_config(
    source: Path, plain: Path, tmp_path: Path
) -> None:
    for place in ("quantization_config", "compression_config"):
        folder = Path(shutil.copytree(source, tmp_path / place / "Kimi-K3"))

        def move(config: dict, place: str = place) -> None:
            config[place] = config["text_config"].pop("quantization_config")

        edit_json(folder / "config.json", move)
        quantize(folder, tmp_path / f"{place}-out", executor=Inline(), progress=False)
        config = json.loads((tmp_path / f"{place}-out" / "config.json").read_text())
        assert [path for path, _ in find_quantization_configs(config)] == ["quantization_config"]
        assert read_tensors(tmp_path / f"{place}-out") == read_tensors(plain)


def test_the_output_is_complete_and_ordinary(source: Path, tmp_path: Path) -> None:
    (source / "pytorch_model.bin").write_bytes(b"never opened")
    (source / ".cache" / "huggingface").mkdir(parents=True)
    (source / ".cache" / "huggingface" / "x.metadata").write_text("cache")
    (source / "figures").mkdir()
    (source / "figures" / "k3.svg").write_text("<svg/>")
    shutil.move(source / "LICENSE", tmp_path / "blob")
    (source / "LICENSE").symlink_to(tmp_path / "blob")
    write_shard(source / "extra.safetensors", [("x.weight", "F32", [1], b"abcd")])
    out = tmp_path / "out"
    report = quantize(source, out, executor=Inline(), progress=False)

    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    side = {p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()}
    side -= {n for n in side if n.endswith(".safetensors") or n.startswith(".cache")}
    side -= {"pytorch_model.bin"}
    made = {"kimi_k3_fp8.json", "README-source.md"}
    assert {n for n in names if not n.endswith(".safetensors")} == side | made
    assert (out / "README-source.md").read_bytes() == (source / "README.md").read_bytes()
    for name in side - {"config.json", "model.safetensors.index.json", "README.md"}:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not any(path.is_symlink() for path in out.rglob("*"))
    umask = os.umask(0)
    os.umask(umask)
    assert {stat.S_IMODE((out / n).stat().st_mode) for n in names} == {0o666 & ~umask}
    left_out = {problem.subject for problem in report.problems if problem.code == "left-out"}
    assert {"extra.safetensors", "pytorch_model.bin"} <= left_out
    assert not (tmp_path / "out.partial").exists()


def test_the_index_follows_the_shards_and_the_format_metadata_is_there(converted: Path) -> None:
    index = json.loads((converted / "model.safetensors.index.json").read_text())
    for shard in converted.glob("*.safetensors"):
        raw = shard.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        assert header["__metadata__"] == {"format": "pt"}
    tensors = read_tensors(converted)
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    assert all(name in read_tensors_of(converted / shard) for name, shard in index["weight_map"].items())


def test_the_record_beside_the_weights_says_how_they_were_made(tiny: Path, converted: Path) -> None:
    import hashlib

    record = json.loads((converted / "kimi_k3_fp8.json").read_text())
    assert Recipe.model_validate(record["recipe"]) == Recipe()
    assert record["fingerprint"] == Recipe().fingerprint
    assert record["source"] == str(tiny)
    assert record["validation"]["problems"] == []
    assert set(record["versions"]) >= {"llmcompressor", "compressed-tensors", "torch"}
    for shard, digest in record["sha256"].items():
        assert hashlib.sha256((converted / shard).read_bytes()).hexdigest() == digest


def test_the_default_place_is_the_sources_last_name(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quantize(tiny, executor=Inline(), progress=False)
    assert validate(tmp_path / "Kimi-K3-FP8-BLOCK").ok


def test_a_plain_script_without_a_main_guard_works(tiny: Path, plain: Path, tmp_path: Path) -> None:
    """With this machine's own worker processes, and nothing of theirs on the terminal."""
    script = tmp_path / "convert.py"
    script.write_text(
        "import sys\nfrom kimi_k3_fp8 import quantize\n"
        f"print(quantize({str(tiny)!r}, {str(tmp_path / 'out')!r}, max_shard_size='2MB').ok)\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == ["True", "False"], done.stderr
    assert "WARNING" not in done.stderr
    assert "Validating" not in done.stderr
    assert read_tensors(tmp_path / "out") == read_tensors(plain)


def test_another_ignore_list_gives_what_the_plain_script_gives_with_it(tiny: Path, tmp_path: Path) -> None:
    recipe = Recipe().with_rule("dense mlp", r"re:.*layers\.0\.mlp\..*", "tensor parallel 16")
    quantize(tiny, tmp_path / "out", recipe, executor=Inline(), progress=False)
    theirs = run_plain_script(tiny, tmp_path / "plain", recipe.ignore_patterns)
    assert read_tensors(tmp_path / "out") == read_tensors(theirs)
