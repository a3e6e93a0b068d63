"""Headers of safetensors files, the shard map and fingerprints, without torch."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mimo.checkpoint.index import FINGERPRINT_CACHE_NAME, INDEX_NAME, SECTIONS, CheckpointIndex
from mimo.errors import CheckpointError

TENSORS = {
    "model.a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "model.b": np.arange(4, dtype=np.int64),
    "visual.c": np.ones((1, 2, 2), dtype=np.float16),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def shard(directory: Path) -> None:
    """The same tensors in two shards with an index."""
    (directory / "model.safetensors").unlink()
    weight_map = {"model.a": "s1.safetensors", "model.b": "s2.safetensors"}
    weight_map["visual.c"] = "s1.safetensors"
    for file in set(weight_map.values()):
        names = [name for name, place in weight_map.items() if place == file]
        save_file({name: TENSORS[name] for name in names}, directory / file)
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("sharded", [False, True])
def test_every_tensor_is_found_where_its_bytes_lie(directory: Path, sharded: bool) -> None:
    if sharded:
        shard(directory)
    index = CheckpointIndex.open(directory)
    assert index.config == {"hidden_size": 8}
    assert set(index.tensors) == set(TENSORS)
    for name, expected in TENSORS.items():
        info = index.tensors[name]
        assert info.shape == expected.shape and info.nbytes == expected.nbytes
        data = info.file.read_bytes()[info.offset : info.offset + info.nbytes]
        assert data == expected.tobytes()
    assert index.tensors["visual.c"].dtype == "F16"


def test_selection_by_prefix_prefixes_and_predicate(directory: Path) -> None:
    index = CheckpointIndex.open(directory)
    assert set(index.select("model.")) == {"model.a", "model.b"}
    assert set(index.select(["visual.", "model.b"])) == {"model.b", "visual.c"}
    assert list(index.select(lambda name: name.endswith("a"))) == ["model.a"]


def test_a_directory_without_config_is_refused(directory: Path) -> None:
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match="cannot read .*config.json: No such file"):
        CheckpointIndex.open(directory)


@pytest.mark.parametrize("value", ["[]", "3", '"none"'])
@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_that_is_no_object_is_told(directory: Path, section: str, value: str) -> None:
    (directory / "config.json").write_text(f'{{"{section}": {value}}}')
    with pytest.raises(CheckpointError, match=f"config.json: {section} is .*, not an object"):
        CheckpointIndex.open(directory)
    (directory / "config.json").write_text(f'{{"{section}": null}}')
    CheckpointIndex.open(directory)


def test_a_directory_without_weights_is_refused(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*.safetensors file in"):
        CheckpointIndex.open(directory)


def test_a_truncated_file_is_refused(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is truncated: it has"):
        CheckpointIndex.open(directory)


@pytest.mark.parametrize(
    "content",
    [b"", b"abc", struct.pack("<Q", 1 << 60), struct.pack("<Q", 2) + b"[]", b"\x02" + bytes(9)],
)
def test_a_file_that_is_not_safetensors_is_refused(directory: Path, content: bytes) -> None:
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        CheckpointIndex.open(directory)


def test_a_missing_shard_is_refused(directory: Path) -> None:
    shard(directory)
    (directory / "s2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*s2\.safetensors"):
        CheckpointIndex.open(directory)


def test_a_map_that_contradicts_a_shard_is_refused(directory: Path) -> None:
    shard(directory)
    index_file = directory / INDEX_NAME
    weight_map = json.loads(index_file.read_text())["weight_map"]
    index_file.write_text(json.dumps({"weight_map": weight_map | {"model.b": "s1.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model\.b is not in s1\.safetensors"):
        CheckpointIndex.open(directory)
    del weight_map["model.a"]
    index_file.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"model\.a of s1\.safetensors is not in"):
        CheckpointIndex.open(directory)


def test_a_tensor_in_two_files_is_refused(directory: Path) -> None:
    save_file({"model.a": TENSORS["model.a"]}, directory / "extra.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.a is in both extra\.safetensors and model"):
        CheckpointIndex.open(directory)


def touch(file: Path) -> None:
    """Another modification time, as any rewrite has."""
    stat = file.stat()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))


def test_a_content_fingerprint_follows_the_bytes(directory: Path) -> None:
    index = CheckpointIndex.open(directory)
    first = index.fingerprint(TENSORS)
    changed = dict(TENSORS)
    changed["model.b"] = changed["model.b"] + 1
    save_file(changed, directory / "model.safetensors")
    touch(directory / "model.safetensors")
    index = CheckpointIndex.open(directory)
    assert index.fingerprint(TENSORS) != first
    assert index.fingerprint(TENSORS, mode="index") == index.fingerprint(TENSORS, mode="index")


def test_a_fingerprint_ignores_shards_order_and_other_tensors(directory: Path) -> None:
    names = ["model.a", "model.b"]
    first = CheckpointIndex.open(directory).fingerprint(names)
    shard(directory)
    index = CheckpointIndex.open(directory)
    assert index.fingerprint(reversed(names)) == first
    assert index.fingerprint([*names, "visual.c"]) != first


def test_an_index_fingerprint_reads_no_weights(directory: Path) -> None:
    index = CheckpointIndex.open(directory)
    first = index.fingerprint(TENSORS, mode="index")
    (directory / "model.safetensors").unlink()
    assert index.fingerprint(TENSORS, mode="index") == first


def test_the_content_hash_is_remembered_until_a_shard_changes(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = CheckpointIndex.open(directory)
    first = index.fingerprint(TENSORS)
    hashed = []
    monkeypatch.setattr("mimo.checkpoint.index._hash_contents", lambda _: hashed.append(1) or [])
    assert index.fingerprint(TENSORS) == first
    assert not hashed
    touch(directory / "model.safetensors")
    index.fingerprint(TENSORS)
    assert hashed


def test_the_cache_may_live_elsewhere(directory: Path, tmp_path_factory) -> None:
    elsewhere = tmp_path_factory.mktemp("cache")
    index = CheckpointIndex.open(directory)
    first = index.fingerprint(TENSORS, cache_directory=elsewhere)
    assert (elsewhere / FINGERPRINT_CACHE_NAME).exists()
    assert not (directory / FINGERPRINT_CACHE_NAME).exists()
    assert index.fingerprint(TENSORS) == first


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_damaged_cache_is_written_anew(directory: Path, content: str) -> None:
    index = CheckpointIndex.open(directory)
    first = index.fingerprint(TENSORS)
    (directory / FINGERPRINT_CACHE_NAME).write_text(content)
    assert index.fingerprint(TENSORS) == first
    assert first in (directory / FINGERPRINT_CACHE_NAME).read_text()


def test_a_cache_that_cannot_be_written_is_no_error(directory: Path, tmp_path: Path) -> None:
    index = CheckpointIndex.open(directory)
    first = index.fingerprint(TENSORS)
    assert index.fingerprint(TENSORS, cache_directory=tmp_path / "absent") == first


def test_the_index_and_the_rules_need_no_torch() -> None:
    code = (
        "import sys, mimo.checkpoint.index, mimo.checkpoint.rules;sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
