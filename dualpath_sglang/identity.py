"""Which model, with which weights, produced a page: what keeps strangers' blocks apart.

Two servers may share pages only when the same weights, configured the same way, computed them.
So the identity is a digest of content, never of names or paths: a moved checkpoint keeps its
cache, and a retrained one under the old path does not get the old one's pages.

| part | digest over |
|---|---|
| model | the architecture's configuration files, and every launch setting that changes KV bytes |
| weights | size and a sample of every weight file; per tensor for safetensors |
| draft | the same for a speculative draft model, for the pools that it fills |
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualpath_storage.errors import StoreError

logger = logging.getLogger(__name__)

_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt")
_NOT_WEIGHTS = ("optimizer", "scheduler", "training_args", "rng_state")
_CONFIG_FILES = ("config.json", "params.json", "hf_quant_config.json", "adapter_config.json")
_VOLATILE_KEYS = ("_name_or_path", "transformers_version")

_SAMPLES_A_FILE = 64
_SAMPLE_BYTES = 4096
_MAX_TENSOR_TABLE_BYTES = 100 << 20
_CACHE_FILE = "fingerprints.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as it is named at launch.

    Args:
        path: directory, file or Hugging Face name.
        revision: of a Hugging Face name.
        download_dir: where Hugging Face files are cached, when not in the usual place.
    """

    path: str
    revision: str | None = None
    download_dir: str | None = None

    def locate(self) -> Path | None:
        """Where its files lie on this machine, or None. Never reaches for the network."""
        local = Path(self.path).expanduser()
        if local.exists():
            return local
        try:
            from huggingface_hub import snapshot_download

            found = snapshot_download(
                self.path,
                revision=self.revision,
                cache_dir=self.download_dir,
                local_files_only=True,
            )
        except Exception as error:  # noqa: BLE001 -- any failure means: not on this machine
            logger.debug("%s is not in the local Hugging Face cache: %s", self.path, error)
            return None
        return Path(found)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine says about the model it serves.

    Args:
        checkpoint: the target model.
        settings: launch settings that change KV bytes, by name.
        draft: the speculative draft model, if one fills pools.
        adapters: LoRA adapters that were named at launch.
        random_weights: the engine makes weights up instead of loading them.
    """

    checkpoint: Checkpoint
    settings: Mapping[str, Any] = field(default_factory=dict)
    draft: Checkpoint | None = None
    adapters: Sequence[Checkpoint] = ()
    random_weights: bool = False


@dataclass(frozen=True, slots=True)
class Identity:
    """The model and weights fields of a geometry; ``draft`` is empty without a draft model."""

    model: str
    weights: str
    draft: str = ""


def identify(
    facts: ModelFacts,
    *,
    model_id: str | None = None,
    weights_revision: str | None = None,
    cache_dir: Path | None = None,
) -> Identity:
    """The identity of what is served.

    Args:
        model_id: stands for the model's configuration files.
        weights_revision: stands for the content of all weight files.
        cache_dir: where fingerprints are remembered, keyed by name, size and times of the files.

    Raises:
        StoreError: there are no weights to look at and no ``weights_revision``: guessing would
            let another checkpoint's pages through.
    """
    cache = FingerprintCache(cache_dir / _CACHE_FILE if cache_dir is not None else None)
    home = facts.checkpoint.locate()
    name, config = _describe(home)
    if config is None and model_id is None:
        logger.warning("No configuration file of %s was found", facts.checkpoint.path)
        config = facts.checkpoint.path
    settings = {k: v for k, v in facts.settings.items() if v not in (None, "", {}, "{}", False)}
    model = digest([config if model_id is None else model_id, settings])
    if weights_revision is not None:
        weights = weights_revision
    elif facts.random_weights:
        weights = "random"
    else:
        weights = _weights_of(facts.checkpoint, home, cache)
    if facts.adapters:
        weights += "+" + digest([_revision_or(a, weights_revision, cache) for a in facts.adapters])
    draft = "" if facts.draft is None else _revision_or(facts.draft, weights_revision, cache)
    return Identity(f"{model_id or name or 'model'}:{model}", weights, draft)


def digest(value: object) -> str:
    """12 hex digits over anything that JSON can hold."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _revision_or(checkpoint: Checkpoint, revision: str | None, cache: FingerprintCache) -> str:
    if revision is not None:
        return f"{revision}/{digest(checkpoint.path)}"
    home = checkpoint.locate()
    return digest([_describe(home)[1], _weights_of(checkpoint, home, cache)])


def _describe(home: Path | None) -> tuple[str | None, object | None]:
    """Name of the architecture, and everything the configuration files say."""
    found: dict[str, object] = {}
    name: str | None = None
    if home is None or not home.is_dir():
        return (None, None) if home is None else (home.stem, home.name)
    for file in _CONFIG_FILES:
        with suppress(OSError):
            raw = (home / file).read_bytes()
            try:
                content = json.loads(raw)
            except ValueError:
                content = hashlib.sha256(raw).hexdigest()
            if isinstance(content, dict):
                content = {k: v for k, v in content.items() if k not in _VOLATILE_KEYS}
                architectures = content.get("architectures") or [content.get("model_type")]
                name = name or (str(architectures[0]) if architectures[0] else None)
            found[file] = content
    return name, found or None


def _weights_of(checkpoint: Checkpoint, home: Path | None, cache: FingerprintCache) -> str:
    files = weight_files(home) if home is not None else []
    if not files:
        raise StoreError(
            f"DualPath finds no weight files of {checkpoint.path} on this machine, so it cannot "
            "tell its pages from another checkpoint's; set weights_revision in "
            "--hicache-storage-backend-extra-config to a text that names these weights."
        )
    return cache.get(files)


def weight_files(home: Path) -> list[Path]:
    """The weight files of a checkpoint: itself, or those in its directory, by name."""
    if home.is_file():
        return [home]
    return sorted(
        p
        for p in home.iterdir()
        if p.suffix in _WEIGHT_SUFFIXES and not p.name.startswith(_NOT_WEIGHTS) and p.is_file()
    )


class FingerprintCache:
    """Fingerprints by the files' names, sizes and times, so that a restart costs a stat each.

    Args:
        path: a small JSON file; None remembers nothing. Losing it costs one more sampling.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def get(self, files: Sequence[Path]) -> str:
        """The fingerprint of these files.

        Raises:
            StoreError: a file cannot be read.
        """
        try:
            state = digest([_stat(f) for f in files])
            known = self._load()
            if state not in known:
                known[state] = fingerprint(files)
                self._save(known)
            return known[state]
        except OSError as error:
            raise StoreError(f"DualPath cannot read the model's weights: {error}.") from error

    def _load(self) -> dict[str, str]:
        if self._path is None:
            return {}
        try:
            known = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(known, dict):
            return {}
        return {str(k): str(v) for k, v in known.items()}

    def _save(self, known: dict[str, str]) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fd, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
            try:
                with os.fdopen(fd, "w", encoding="utf-8") as file:
                    json.dump(known, file, indent=1, sort_keys=True)
                Path(name).replace(self._path)
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            logger.debug("The weights' fingerprint is not remembered: %s", error)


def _stat(path: Path) -> list[object]:
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def fingerprint(files: Sequence[Path]) -> str:
    """24 hex digits over name, size and a sample of every file.

    A fine-tune may leave most tensors alone, so safetensors files are sampled inside up to 64 of
    their tensors rather than at even distances; 64 samples of 4 KiB a file at most.
    """
    with ThreadPoolExecutor(min(16, len(files)), "dualpath-fingerprint") as pool:
        parts = list(pool.map(_sample, files))
    total = hashlib.sha256()
    for file, part in zip(files, parts, strict=True):
        total.update(f"{file.name}\0".encode())
        total.update(part)
    return total.hexdigest()[:24]


def _sample(path: Path) -> bytes:
    summary = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        summary.update(size.to_bytes(8, "little"))
        for start, length in _ranges(file.fileno(), size, path.suffix == ".safetensors"):
            summary.update(start.to_bytes(8, "little"))
            summary.update(os.pread(file.fileno(), length, start))
    return summary.digest()


def _ranges(fd: int, size: int, tensors: bool) -> Iterator[tuple[int, int]]:
    """Start and length of each sample: the ends of the file, then its inside."""
    yield 0, _SAMPLE_BYTES
    yield max(0, size - _SAMPLE_BYTES), _SAMPLE_BYTES
    spans = _tensor_spans(fd, size) if tensors else None
    if spans is None:
        step = max(1, size // _SAMPLES_A_FILE)
        spans = [(start, start + step) for start in range(0, size, step)]
    every = -(-len(spans) // _SAMPLES_A_FILE) if spans else 1
    for begin, end in spans[::every]:
        length = min(_SAMPLE_BYTES, end - begin)
        yield begin + (end - begin - length) // 2, length


def _tensor_spans(fd: int, size: int) -> list[tuple[int, int]] | None:
    """First and last byte of every tensor of a safetensors file, or None if it is none."""
    try:
        table_bytes = int.from_bytes(os.pread(fd, 8, 0), "little")
        if not 0 < table_bytes <= min(size, _MAX_TENSOR_TABLE_BYTES):
            return None
        table = json.loads(os.pread(fd, table_bytes, 8))
        base = 8 + table_bytes
        return sorted(
            (base + int(entry["data_offsets"][0]), base + int(entry["data_offsets"][1]))
            for name, entry in table.items()
            if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
