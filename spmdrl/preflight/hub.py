"""Models and data by their names on a hub, such as `hf:Qwen/Qwen3-0.6B@main`, found in huggingface_hub's cache.

What the cache lacks is downloaded where `run.download` says so, and nowhere else; so are files that are visibly
damaged: cut short, empty, or of another form than their name says. Ranks of a node that ask for the same file wait for
the one that fetches it.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from spmdrl.config import EvalConfig, MissingSetting, ModelReward, Section, SectionT, SetData
from spmdrl.config.sets import GENERATED_ITEMS, known_sets
from spmdrl.config.strict import shown
from spmdrl.data.sources import open_source
from spmdrl.data.stream import question_key
from spmdrl.faults.text import sentence_of
from spmdrl.faults.verdict import print_once_per_node
from spmdrl.types import UserError

PREFIX = "hf:"
_REPOSITORY = r"hf:(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?"
_MODEL = re.compile(_REPOSITORY)
_FILE = re.compile(rf"{_REPOSITORY}:(?P<file>.+)")
# A model directory without weights in formats that can run code, and without code.
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
_SPLITS = ("train", "test", "validation")  # as files of data sets name them
_USUAL_FOLDERS = ("main", "default", "data")  # of a data set, where others have other forms of it


class NotInCache(UserError):
    """Nothing on this machine has this name, and downloads are not asked for."""


def located(cfg: SectionT) -> tuple[SectionT, list[str]]:
    """Return the settings with directories and files in place of names on a hub, and sentences about those not found.

    A directory's name ends with the commit of the revision. Settings may be missing.
    """
    cfg, problems = _with_models(cfg)
    found = partial(_found, download=_downloads(cfg), problems=problems)
    changes: dict[str, Any] = {}
    for table in ("data", "eval", "held_out"):
        if (sources := _get(_get(cfg, table), "sources")) is not None:
            places = []
            for place, source in enumerate(sources):
                setting, path = f"{table}.sources.{place}", getattr(source, "path", None)
                if isinstance(source, SetData) and path is None and not source.is_generated:
                    path = found(set_file, source.name, f"{setting}.name")
                elif path is not None:
                    path = found(data_file, path, f"{setting}.path")
                places.append(source if path is None else source.model_copy(update={"path": path}))
            changes[table] = _get(cfg, table).model_copy(update={"sources": tuple(places)})
    if not problems and isinstance(held_out := changes.get("eval"), EvalConfig) and _get(held_out, "num_prompts") == 0:
        try:
            changes["eval"] = _with_all(held_out)
        except UserError as error:
            problems.append(f"eval.sources: {error}")
    return cfg.model_copy(update=changes), problems


def _with_all(held_out: EvalConfig) -> EvalConfig:
    """Return the table of evaluation sets that asks all that they have. Raises UserError for a file that is wrong."""
    sources = []
    for source in held_out.sources:
        if not isinstance(source, SetData):  # about which a rule of the table says what is missing
            return held_out
        count = GENERATED_ITEMS
        if not source.is_generated:
            opened = open_source(source, seed=0)
            assert opened.num_rows is not None
            count = len({question_key(opened.row(number)) for number in range(opened.num_rows)})
        sources.append(source.model_copy(update={"weight": float(count)}))
    total = int(sum(source.weight for source in sources))
    return held_out.model_copy(update={"sources": tuple(sources), "num_prompts": total})


def with_models_here(cfg: SectionT) -> SectionT:
    """Return the settings with directories in place of models' names on a hub, for what reads no data.

    Raises UserError about those not found.
    """
    return _require_found(*_with_models(cfg))


def with_files_here(cfg: SectionT) -> SectionT:
    """Return the settings as `located` does. Raises UserError about what is not found."""
    return _require_found(*located(cfg))


def _require_found(cfg: SectionT, problems: list[str]) -> SectionT:
    if problems:
        raise UserError("\n".join(problems))
    return cfg


def _with_models(cfg: SectionT) -> tuple[SectionT, list[str]]:
    problems: list[str] = []
    found = partial(_found, model_folder, download=_downloads(cfg), problems=problems)
    changes: dict[str, Any] = {
        table: _get(cfg, table).model_copy(update={"path": found(path, f"{table}.path")})
        for table in ("model", "critic")
        if (path := _get(_get(cfg, table), "path")) is not None
    }
    if others := _get(cfg, "models"):
        changes["models"] = {
            name: one.model_copy(update={"path": found(one.path, f"models.{name}.path")})
            for name, one in others.items()
        }
    reward = _get(cfg, "reward")
    if any(isinstance(term, ModelReward) for term in _get(reward, "terms") or ()):
        terms = tuple(
            term.model_copy(update={"path": found(term.path, f"reward.terms.{place}.path")})
            if isinstance(term, ModelReward)
            else term
            for place, term in enumerate(reward.terms)
        )
        changes["reward"] = reward.model_copy(update={"terms": terms})
    return cfg.model_copy(update=changes), problems


def _found(find: Callable[[str, bool], str], path: Any, setting: str, *, download: bool, problems: list[str]) -> Any:
    """Return the path of a name on a hub or of a set, and any other path as it is; add a sentence if there is
    none."""
    if not isinstance(path, str) or not (path.startswith(PREFIX) or find is set_file):
        return path
    try:
        return find(path, download)
    except UserError as error:
        remedy = "; set run.download = true to fetch it once" if isinstance(error, NotInCache) else ""
        problems.append(f'{setting} = "{path}": {error}{remedy}')
        return path


def _downloads(cfg: Section) -> bool:
    return bool(_get(_get(cfg, "run"), "download"))


def _get(section: Section | None, name: str) -> Any:
    """Return a setting, None where it is missing."""
    try:
        return getattr(section, name, None)
    except MissingSetting:
        return None


def model_folder(name: str, download: bool) -> str:
    """Return the directory of `hf:ORGANISATION/NAME[@REVISION]`. Raises UserError when it is not there."""
    parts = _parts(_MODEL, name, "hf:ORGANISATION/NAME@REVISION")
    return _asked("snapshot_download", parts, download, repo_type="model", allow_patterns=list(_MODEL_FILES))


def data_file(name: str, download: bool) -> str:
    """Return the file of `hf:ORGANISATION/NAME[@REVISION]:FILE`. Raises UserError when it is not there."""
    parts = _parts(_FILE, name, "hf:ORGANISATION/NAME@REVISION:FILE, with the path of the file in the data set")
    return _asked("hf_hub_download", parts, download, repo_type="dataset", filename=parts["file"])


def set_file(name: str, download: bool) -> str:
    """Return the file of the evaluation set of a name, such as `math500`. Raises UserError when it is not there."""
    found = known_sets()[name]
    return data_file(with_split_file(f"{PREFIX}{found.repository}", download, split=found.split), download)


def with_training_file(name: str, download: bool) -> str:
    """Complete `hf:ORGANISATION/NAME[@REVISION]` by the one file of training data that the data set has; any other name
    is returned as it is. Raises UserError where there are none or several."""
    return with_split_file(name, download, split="train")


def with_split_file(name: str, download: bool, *, split: str) -> str:
    """Do the same for the file of another split, which has the split's name in its own."""
    if (match := _MODEL.fullmatch(name)) is None:
        return name
    if download:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError

        try:
            listed = huggingface_hub.list_repo_files(
                match["repository"], revision=match["revision"], repo_type="dataset"
            )
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise UserError(
                f"its files cannot be listed: {sentence_of(error, 300)}; or name one: {name}:FILE"
            ) from error
        files = [Path(file) for file in listed]
    else:
        folder = Path(_asked("snapshot_download", match.groupdict(), download, repo_type="dataset"))
        files = [file.relative_to(folder) for file in folder.rglob("*")]
    rows = sorted(str(file) for file in files if file.suffix in (".jsonl", ".parquet"))
    others = [one for one in _SPLITS if one != split]
    of_split = [file for file in rows if split in file]
    of_split = of_split or [file for file in rows if not any(one in file for one in others)]
    usual = [file for file in of_split if Path(file).parts[0] in _USUAL_FOLDERS]
    of_split = usual if len(of_split) > 1 and usual else of_split
    if len(of_split) != 1:
        missing = "" if of_split or not rows else f"it has no file of the split {split}; "
        candidates = of_split or rows
        there_are = f"one of {', '.join(candidates[:10])}" if candidates else "none of jsonl or parquet is there"
        raise UserError(f"{missing}name its file: {name}:FILE; {there_are}")
    return f"{name}:{of_split[0]}"


def _parts(pattern: re.Pattern[str], name: str, form: str) -> Mapping[str, str | None]:
    match = pattern.fullmatch(name)
    if match is None:
        raise UserError(f"a name on a hub has the form {form}")
    return match.groupdict()


def _asked(function: str, parts: Mapping[str, str | None], download: bool, **options: Any) -> str:
    import huggingface_hub  # takes a second, so only when a name is used
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if not download:  # the library would ask its hub about other things than files
        constants.HF_HUB_OFFLINE = True
    options |= {"revision": parts["revision"], "local_files_only": not download}
    ask = partial(getattr(huggingface_hub, function), parts["repository"], **options)
    try:
        found = Path(ask())
        damaged = damages(found)
        if damaged and not download:
            raise NotInCache("; ".join(f"{shown(file)} is damaged: {why}" for file, why in damaged.items()))
        for file, why in damaged.items():
            print_once_per_node(f"{shown(file)} is damaged: {why}; it is fetched again")
            file.resolve().unlink(missing_ok=True)  # the blob that the file is a link to
            file.unlink(missing_ok=True)
        found = Path(ask()) if damaged else found
    except NotInCache:
        raise
    except OfflineModeIsEnabled as error:
        raise UserError("it is to be fetched, but HF_HUB_OFFLINE forbids it; unset the variable") from error
    except LocalEntryNotFoundError as error:
        if not download:
            raise NotInCache("it is not in the cache") from error
        raise UserError(f"it is not in the cache, and the hub cannot be reached: {sentence_of(error, 300)}") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(f"it cannot be fetched: {sentence_of(error, 300)}") from error
    return str(found)


def require_writable(name: str) -> None:
    """Raise UserError unless something could be sent to `ORGANISATION/NAME` on the hub."""
    import huggingface_hub
    from huggingface_hub import constants

    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) is None:
        raise UserError(f"--push {name}: a repository is ORGANISATION/NAME, without hf: and a revision")
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"--push {name}: HF_HUB_OFFLINE forbids it; unset the variable")
    if huggingface_hub.get_token() is None:
        raise UserError(f"--push {name} needs a token: set HF_TOKEN, or log in by `hf auth login`")


def send(folder: Path, name: str, *, private: bool) -> str:
    """Send a directory to a model repository, which is made where there is none; returns its address. Raises UserError
    where the hub refuses it."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    hub = huggingface_hub.HfApi()
    try:
        address = hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Model and card from spmdrl")
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(f"--push {name}: {sentence_of(error, 300)}; the model itself is in {shown(folder)}") from error
    return str(address)


def damages(place: Path) -> dict[Path, str]:
    """Return the file, or the files of a folder, that cannot be what was fetched, with the reason for each.

    Only their form is checked: to add up the bytes of a model's weights takes as long as loading them.
    """
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    return {file: why for file in files if (why := _damage_of(file))}


def _damage_of(file: Path) -> str:
    """Return why a file is damaged, or nothing. A folder is left to its reader."""
    try:
        if file.is_dir():
            return ""
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            if file.suffix == ".json":
                json.loads(opened.read())
            elif file.suffix == ".safetensors":
                (head_bytes,) = struct.unpack("<Q", opened.read(8))
                tensors = json.loads(opened.read(head_bytes)) if head_bytes < size else {}
                ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
                if 8 + head_bytes + max(ends, default=0) != size:
                    return f"its {size} bytes are not as many as its head says"
            elif file.suffix == ".parquet":
                opened.seek(max(0, size - 4))
                return "" if opened.read() == b"PAR1" else "it does not end as parquet does"
            elif file.suffix in (".jsonl", ".model") and not size:
                return "it is empty"
    except OSError as error:
        return error.strerror or type(error).__name__
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error, RecursionError):
        return f"it is no {file.suffix.removeprefix('.')}"
    return ""
