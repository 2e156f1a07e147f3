"""A folder, here or remote, and which of its files hold a model: as `transformers` chooses them.

A format is a row of data: the names of its weights and its configuration, and the axis along which
it splits tensors over files. The names of its tensors belong to a family, under the format's model
type; what has to be computed from its configuration is in `wqk.checkpoints.configurations`.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from wqk.checkpoints.files import LocalFile, bytes_at, is_text
from wqk.errors import CheckpointError, did_you_mean, errors_about, first_line

if TYPE_CHECKING:
    from wqk.checkpoints.files import ByteSource
    from wqk.checkpoints.ranged import Workers

# Largest configuration or index; YAML, which usually takes 5 kB, is slow to parse.
LARGEST_CONFIGURATION, LARGEST_YAML = 64 * 2**20, 2**18


class Folder(NamedTuple):
    """A folder, here or remote."""

    name: str  # what the user calls it
    source: Callable[[str], ByteSource | None]  # the bytes of a file; None if it does not exist
    names: Sequence[str] | None = None  # its files; None if they cannot be listed
    below: Callable[[], Iterable[str]] = tuple  # paths of files deeper in it
    workers: Workers | None = None  # what fetches the files of a remote folder

    def holds(self, file: str) -> bool:
        """Whether there is such a file; for folders that cannot be listed."""
        return self.source(file) is not None

    def object(self, file: str) -> dict[str, Any]:
        """The object in a file of JSON or YAML; empty if there is no file."""
        source = self.source(file)
        if source is None:
            return {}
        if source.size > LARGEST_CONFIGURATION:
            raise CheckpointError(f"{source.name}: too large for a configuration file")
        content = bytes_at(source, 0, source.size)
        parse = _parse_yaml if file.endswith((".yaml", ".yml")) else _parse_json
        with errors_about(source.name):
            return parse(content)


def _parse_json(text: bytearray) -> dict[str, Any]:
    try:
        value = json.loads(text.decode("utf-8"))
        if re.search(rb"\\u[dD][89a-fA-F]", text):  # halves of pairs cannot be stored or printed
            whole = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
            value = json.loads(whole)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError("expected a JSON object")
    return value


def _parse_yaml(text: bytearray) -> dict[str, Any]:
    import yaml

    from wqk.checkpoints.pickles import plain

    try:
        if len(text) > LARGEST_YAML:
            raise ValueError(f"larger than {LARGEST_YAML} bytes")
        value = yaml.safe_load(text.decode("utf-8"))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(f"not valid YAML ({first_line(error)})") from None
    if not isinstance(value, dict):
        raise CheckpointError("expected keys with values")
    return dict(plain(value))


def local_folder(folder: Path) -> Folder:
    """A folder on disk."""

    def source(name: str) -> LocalFile | None:
        return LocalFile(folder / name) if os.path.lexists(folder / name) else None

    def below() -> list[str]:
        return [str(path.relative_to(folder)) for path in folder.glob("*/*")]

    return Folder(str(folder), source, [path.name for path in folder.iterdir()], below)


def beside(path: Path) -> str:
    """The end of a message on a path that is missing: a similar one beside it.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "original").touch()
    >>> beside(folder / "orignal").replace(str(folder), "…")
    "; did you mean '…/original'?"
    """
    try:
        return did_you_mean(str(path), map(str, islice(path.parent.iterdir(), 1000)))
    except (OSError, ValueError):
        return ""


def exists(path: Path) -> bool:
    """Whether a path exists; one that the system rejects does not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


class Format(NamedTuple):
    """What one library writes.

    ``split_axis`` gives the axis along which a tensor of some name and shape, in a model of some
    width, is split over tensor-parallel files; None if every file has all of it.
    """

    name: str  # for messages
    weights: str  # pattern of the names of its weights, within the folder
    # The first that exists is its configuration; ``{}`` is the first group of the pattern.
    config: tuple[str, ...] = ("config.json",)
    section: str = ""  # key of the configuration that holds the model's own, where it is nested
    model_type: str = ""  # what families call its models; empty where the configuration says it
    split_axis: Callable[..., int | None] | None = None

    def configurations(self, weights: str) -> tuple[str, ...]:
        """The names of the configuration that weights of this name may have."""
        match = re.fullmatch(self.weights, weights)
        group = match[1] if match and match.re.groups else ""
        return tuple(name.format(group) for name in self.config)

    def files(self, names: Iterable[str]) -> tuple[str, ...]:
        """Its weights among these names, sorted."""
        return tuple(sorted(name for name in names if re.fullmatch(self.weights, name)))


def _llama_axis(name: str, shape: tuple[int, ...], width: object) -> int | None:
    """Output projections by columns, all others by rows; embeddings either way."""
    if len(shape) != 2:
        return None
    if name.startswith("tok_embeddings."):
        return 0 if shape[1] == width else 1
    return 1 if re.search(r"\b(wo|w2)\.weight$", name) else 0


FORMATS = (
    Format(
        "the original files of LLaMA or Mistral",
        r"consolidated(\.\d+)?\.(pth|pt|safetensors)",
        ("params.json",),
        model_type="llama-original",
        split_axis=_llama_axis,
    ),
    Format("LitGPT", r"lit_model\.pth", ("model_config.yaml",), model_type="litgpt"),
    Format(
        "nanochat",
        r"model_([0-9]{6})\.pt",
        ("meta_{}.json",),
        section="model_config",
        model_type="nanochat",
    ),
    Format(
        "OpenCLIP",
        r"open_clip_(pytorch_)?model\.(safetensors|bin)",
        ("open_clip_config.json",),
        section="model_cfg",
        model_type="open_clip",
    ),
    Format("GGUF", r"[^/]*\.gguf", ()),
)


def format_of(name: str) -> Format | None:
    """The format whose weights have this name; None for `transformers` and unknown ones.

    Examples
    --------
    >>> format_of("consolidated.00.pth").name
    'the original files of LLaMA or Mistral'
    >>> format_of("model.safetensors")
    """
    return next((one for one in FORMATS if re.fullmatch(one.weights, name)), None)


ARCHIVES = (".bin", ".pt", ".pth", ".ckpt")
ENDINGS = (".safetensors", *ARCHIVES, ".gguf")

# One file before the index of several, safetensors before archives; then other libraries' names.
PREFERRED = (
    "model.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.bin", "diffusion_pytorch_model.bin.index.json",
    "open_clip_model.safetensors", "open_clip_pytorch_model.bin",
)  # fmt: skip

# Other files with the endings of weights: adapters, and the Trainer's own state.
NOT_WEIGHTS = ("adapter_", "training_args.", "optimizer.", "scheduler.", "scaler.", "rng_state")


class Weights(NamedTuple):
    """A folder's weights."""

    files: tuple[str, ...]  # names within the folder; none if it holds no weights
    listed_in: str | None = None  # the index that names them, if one does
    notes: tuple[str, ...] = ()  # which files of the same kind were passed over
    format: Format | None = None  # None for that of `transformers`


def choose_weights(folder: Folder) -> Weights:
    """A folder's weights: those that `transformers` would load, or of another format.

    Raises `CheckpointError` if an index is damaged, or names files outside the folder.
    """
    names = folder.names or ()
    exists = set(names).__contains__ if folder.names is not None else folder.holds
    first = next((name for name in PREFERRED if exists(name)), None)
    if first is None:
        for one in FORMATS:
            if own := one.files(names):
                return Weights(own, format=one) if one.split_axis else _one_model(own, one)
        found = sorted(n for n in names if not n.startswith(NOT_WEIGHTS))
        safetensors = tuple(name for name in found if name.endswith(".safetensors"))
        archives = tuple(n for n in found if n.endswith(ARCHIVES) and unread_format(n) is None)
        return Weights(safetensors or archives)
    if first.endswith(".json"):
        files = shard_names(folder.object(first), f"{folder.name}/{first}")
        chosen = Weights(tuple(files), first)
    else:
        chosen = Weights((first,), format=format_of(first))
    return chosen._replace(notes=_passed_over(chosen, names))


def parts_of(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """A file with its other parts, where it is called ``…-00001-of-00003…``.

    Examples
    --------
    >>> parts_of("a-00001-of-00002.gguf", ["a-00002-of-00002.gguf", "b.gguf"])
    ('a-00001-of-00002.gguf', 'a-00002-of-00002.gguf')
    """
    match = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", name)
    if match is None:
        return (name,)
    pattern = re.compile(rf"{re.escape(match[1])}\d{{5}}{re.escape(match[2])}")
    return tuple(sorted({name, *filter(pattern.fullmatch, names)}))


def _one_model(names: tuple[str, ...], layout: Format) -> Weights:
    """The only model among these files, or the last of a run; `CheckpointError` for several."""
    own, notes = parts_of(names[0], names), list[str]()
    if "{}" in "".join(layout.config) and len(names) > 1:
        own = names[-1:]
        notes.append(f"read {own[0]}, the last of {len(names)} steps; name another by its path")
    others = [name for name in names if name not in own and name.endswith(".gguf")]
    if others:
        shown = ", ".join((names[0], *others)[:4]) + (", …" if len(others) > 3 else "")
        raise CheckpointError(f"several models here: {shown}; choose one by its path or address")
    return Weights(own, notes=tuple(notes), format=layout)


def _passed_over(chosen: Weights, names: Iterable[str]) -> tuple[str, ...]:
    """A note on files of the same format that were skipped."""
    ending = PurePath(chosen.files[0]).suffix
    others = sorted(
        name
        for name in set(names) - {*chosen.files, chosen.listed_in}
        if (name.endswith((ending, f"{ending}.index.json")) or format_of(name))
        and not name.startswith(NOT_WEIGHTS)
    )
    if not others:
        return ()
    some = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    return (
        f"read {chosen.listed_in or chosen.files[0]}, as transformers does; passed over {some}",
    )


def shard_names(index: Mapping[str, Any], name: str) -> list[str]:
    """The files that a sharded model's index names, all of them in its own folder."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{name}: lacks the 'weight_map' of a sharded model")
    shards = sorted({str(value) for value in weight_map.values()})
    for shard in shards:
        is_name = PurePath(shard).name == shard and shard not in ("", ".", "..")
        if not is_name or not is_text(shard) or "\0" in shard:
            raise CheckpointError(f"{name}: names {shard!r}, outside its own folder")
    return shards


def unread_format(name: str) -> str | None:
    """For a file in a format that is not read: what it is, and what to do; None for others.

    Examples
    --------
    >>> unread_format("model.onnx")
    'ONNX; a graph whose weights may be folded and renamed; use the checkpoint it was exported from'
    """
    found = (one for one in _unread_formats() if re.fullmatch(one["name"], name))
    return next((f"{one['is']}; {one['remedy']}" for one in found), None)


@cache
def _unread_formats() -> list[dict[str, str]]:
    text = resources.files("wqk.checkpoints").joinpath("formats.toml").read_text("utf-8")
    formats: list[dict[str, str]] = tomllib.loads(text)["format"]
    return formats


def no_weights(folder: Folder) -> CheckpointError:
    """The error for a folder without weights, which lists what it contains instead."""
    names = sorted(folder.names or ())
    for name in (*names, *sorted(folder.below())):
        if what := unread_format(PurePath(name).name):
            return CheckpointError(f"no weights that wqk reads; {name} is {what}")
    weights = (PurePath(path) for path in folder.below() if path.endswith(ENDINGS))
    deeper = sorted({str(path.parent) for path in weights} - {"."})
    if deeper:
        return CheckpointError(
            f"no weights here, but in its folders {', '.join(deeper[:5])}; choose "
            "one by its path, or in Python with subfolder="
        )
    expected = "expected model.safetensors, model.safetensors.index.json or pytorch_model.bin"
    some = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return CheckpointError(f"no weights here; {expected}{f', found {some}' if some else ''}")
