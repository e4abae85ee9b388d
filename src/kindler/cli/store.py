"""`kindler models` and `kindler datasets`: ls, put, get, rm and tag. Files become objects in `files.py`."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kindler.cli.opened_store import add_store, as_json, as_table, opened
from kindler.errors import AlreadyExistsError, ConfigError, NotFoundError

if TYPE_CHECKING:
    from kindler.shelves.shelf import Shelf
    from kindler.store import Version

_NAMES = "a name, or one of its versions: NAME@3, NAME@tag, NAME^ (the one before the newest)"
_GLOBS = "a name or a quoted glob: '*' matches within one part of a name, '**' across parts"


def add_commands(commands: Any) -> None:
    """Add `kindler models` and `kindler datasets`."""
    models = commands.add_parser("models", help="list, store, fetch, remove and tag models")
    _add_verbs(models, "models", "a .keras, .onnx, .xml, .pt2 or exported file, or a SavedModel's folder")
    datasets = commands.add_parser("datasets", help="list, store, fetch, remove and tag datasets")
    _add_verbs(
        datasets, "datasets", "a .parquet, .csv, .json, .jsonl, .npy, .npz, .tfrecord or exported file"
    )


def _add_verbs(parser: argparse.ArgumentParser, shelf: str, files: str) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="verb", required=True)
    _add_ls(verbs.add_parser("ls", help=f"list {shelf}"), shelf)
    _add_put(verbs.add_parser("put", help="store a file as the newest version of a name"), shelf, files)
    _add_get(verbs.add_parser("get", help="write a version to a file or a folder"), shelf)
    removing = verbs.add_parser("rm", help="remove names with all their versions, or single versions")
    removing.add_argument("names", nargs="+", metavar="NAME", help=f"{_NAMES}; or {_GLOBS}")
    removing.add_argument("--force", action="store_true", help="do not fail if there is none")
    removing.set_defaults(run=_remove)
    tagging = verbs.add_parser("tag", help="point a tag at a version, or show the tags of a name")
    tagging.add_argument("name", metavar="NAME", help=_NAMES)
    tagging.add_argument("tag", nargs="?", metavar="TAG", help="the tag; it moves if it exists")
    tagging.add_argument("--remove", action="store_true", help="take the tag away instead")
    tagging.set_defaults(run=_tag)
    if shelf == "models":
        _add_split(verbs.add_parser("split", help="divide an alias's requests among versions, or show how"))
    for verb in verbs.choices.values():
        add_store(verb)
        verb.set_defaults(shelf=shelf)


def _add_split(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME@ALIAS", help="the alias; a name alone shows all of its splits")
    parser.add_argument(
        "--canary", action="append", default=[], metavar="VERSION=SHARE",
        help="let this version answer a share of the requests, such as 4=0.1; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--shadow", action="append", default=[], metavar="VERSION=SHARE",
        help="call this version with a share of the requests beside; repeatable",
    )  # fmt: skip
    parser.add_argument("--clear", action="store_true", help="send all requests to the alias's own version")
    parser.set_defaults(run=_split)


def _add_ls(parser: argparse.ArgumentParser, shelf: str) -> None:
    parser.add_argument("pattern", nargs="?", default="**", metavar="PATTERN", help=_GLOBS)
    parser.add_argument("--versions", action="store_true", help="list all versions, not only the newest")
    parser.add_argument("--kind", help=f"list only {shelf} of this kind")
    parser.add_argument("--hidden", action="store_true", help="also list names that begin with '.' or '_'")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_list)


def _add_put(parser: argparse.ArgumentParser, shelf: str, files: str) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help=files)
    parser.add_argument("name", metavar="NAME", help="the name, without a version")
    parser.add_argument("--tag", action="append", metavar="TAG", help="tag the new version; repeatable")
    parser.add_argument("--kind", help="kind to store the file as, if several apply")
    parser.add_argument(
        "--attribute", action="append", default=[], metavar="KEY=VALUE",
        help="attribute of the version; VALUE is JSON, else text; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--trusted", action="store_true", help="allow objects that can run code when they are loaded"
    )
    if shelf == "datasets":
        parser.add_argument(
            "--mode", choices=["fail", "replace", "append"], default="fail",
            help="what to do if the name exists (default: %(default)s)",
        )  # fmt: skip
    parser.set_defaults(run=_put)


def _add_get(parser: argparse.ArgumentParser, shelf: str) -> None:
    parser.add_argument("name", metavar="NAME", help=_NAMES)
    if shelf == "models":
        parser.add_argument(
            "path", type=Path, metavar="PATH",
            help="a file for a model that is one file, else a new folder",
        )  # fmt: skip
        parser.add_argument(
            "--format", choices=["files", "archive", "mlflow"], default="files",
            help="the model's own files, one file that `put` accepts, or a folder with an MLflow model"
            " (default: %(default)s)",
        )  # fmt: skip
    else:
        parser.add_argument(
            "path", metavar="FILE",
            help="a .parquet, .csv, .json, .jsonl, .npy, .npz or .tfrecord file; - prints CSV, or JSON",
        )  # fmt: skip
        parser.add_argument("--columns", metavar="A,B", help="only these columns of a table")
        parser.add_argument(
            "--format", choices=["auto", "archive"], default="auto",
            help="the format of the file's extension, or one file that `put` accepts (default: %(default)s)",
        )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument(
        "--trusted", action="store_true", help="allow objects that can run code when they are loaded"
    )
    parser.set_defaults(run=_get)


def _list(chosen: argparse.Namespace) -> int:
    shelf = _shelf(chosen)
    versions = shelf.newest(chosen.pattern, hidden=chosen.hidden, kind=chosen.kind)
    tags: dict[tuple[str, int], list[str]] = {}
    for name, by_tag in shelf.store.all_tags(shelf.bucket, shelf.shelf).items():
        for tag, number in sorted(by_tag.items()):
            tags.setdefault((name, number), []).append(tag)
    if chosen.versions:
        versions = [one for v in versions for one in shelf.versions(v.name)]
    print((as_json if chosen.json else as_table)(versions, tags))
    return 0


def _put(chosen: argparse.Namespace) -> int:
    from kindler.cli.files import to_store

    shelf = _shelf(chosen)
    if _is_archive(chosen.file):
        print(shelf.import_(chosen.file, chosen.name, tag=chosen.tag))
        return 0
    options: dict[str, Any] = {"attributes": dict(map(_attribute, chosen.attribute))}
    if chosen.shelf == "datasets":
        options["mode"] = chosen.mode
    obj = to_store(chosen.file) if chosen.shelf == "datasets" else chosen.file
    print(shelf.put(obj, chosen.name, tag=chosen.tag, kind=chosen.kind, trusted=chosen.trusted, **options))
    return 0


def _get(chosen: argparse.Namespace) -> int:
    shelf = _shelf(chosen)
    version = shelf.metadata(chosen.name)
    if chosen.format == "archive":
        shelf.export(str(version), _free(Path(chosen.path), chosen.force))
    elif chosen.format == "mlflow":
        shelf.export_mlflow(str(version), chosen.path, trusted=chosen.trusted)  # type: ignore[attr-defined]
    elif chosen.shelf == "models":
        _get_model(shelf, version, chosen.path, chosen.force)
    else:
        _get_dataset(shelf, version, chosen)
    if chosen.path != "-":
        print(f"{version} -> {chosen.path}")
    return 0


def _get_model(shelf: Shelf, version: Version, path: Path, force: bool) -> None:
    if len(version.files) != 1:
        shelf.get(str(version), local=path)
        return
    target = path / Path(version.files[0].path).name if path.is_dir() else path
    _free(target, force)
    with tempfile.TemporaryDirectory(prefix="kindler-get-") as folder:
        copied = shelf.get(str(version), local=Path(folder) / "files")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(copied / version.files[0].path, target)


def _get_dataset(shelf: Shelf, version: Version, chosen: argparse.Namespace) -> None:
    from kindler.cli.files import write

    options: dict[str, Any] = {"trusted": chosen.trusted}
    if version.kind == "parquet":
        options["as_"] = "arrow"
    if chosen.columns:
        options["columns"] = chosen.columns.split(",")
    target = None if chosen.path == "-" else _free(Path(chosen.path), chosen.force)
    if version.kind == "tfrecord":
        _get_records(shelf, version, target)
        return
    write(shelf.get(str(version), **options), target)


def _get_records(shelf: Shelf, version: Version, target: Path | None) -> None:
    """Parts one after the other: so a file of records is a file of records."""
    from kindler.cli.files import write

    if target is None or target.suffix not in (".tfrecord", ".tfrecords"):
        write(shelf.get(str(version), as_="arrow"), target)
        return
    with tempfile.TemporaryDirectory(prefix="kindler-get-") as folder, target.open("wb") as file:
        copied = shelf.get(str(version), local=Path(folder) / "files")
        for part in sorted(copied.iterdir()):
            file.write(part.read_bytes())


def _remove(chosen: argparse.Namespace) -> int:
    shelf = _shelf(chosen)
    wanted = [name for pattern in chosen.names for name in _matching(shelf, pattern, chosen.force)]
    for name in wanted:
        for number in shelf.drop(name, force=chosen.force):
            print(f"{name.partition('@')[0].rstrip('^')}@{number}")
    return 0


def _tag(chosen: argparse.Namespace) -> int:
    shelf = _shelf(chosen)
    if chosen.tag is None:
        if chosen.remove:
            raise ConfigError("--remove needs a tag.")
        shelf.metadata(chosen.name)
        for tag, number in sorted(shelf.tags(chosen.name).items()):
            print(f"{tag} {number}")
    elif chosen.remove:
        shelf.untag(chosen.name, chosen.tag)
    else:
        print(f"{shelf.tag(chosen.name, chosen.tag)} {chosen.tag}")
    return 0


def _split(chosen: argparse.Namespace) -> int:
    models: Any = _shelf(chosen)
    given = {what: dict(map(_share, getattr(chosen, what))) for what in ("canary", "shadow")}
    if any(given.values()) or chosen.clear:
        if any(given.values()) and chosen.clear:
            raise ConfigError("--clear takes the shares away; --canary and --shadow set them.")
        models.split(chosen.name, **given)
    name, _, alias = chosen.name.partition("@")
    models.metadata(chosen.name)
    for split in models.splits(name).values():
        if alias in ("", split.alias):
            shares = [f"canary {number}={share:g}" for number, share in split.canary.items()]
            shares += [f"shadow {number}={share:g}" for number, share in split.shadow.items()]
            print(f"{name}@{split.alias} {' '.join(shares)}")
    return 0


def _share(text: str) -> tuple[int, float]:
    number, _, share = text.partition("=")
    try:
        return int(number), float(share)
    except ValueError:
        raise ConfigError(f"{text!r} is not VERSION=SHARE, such as 4=0.1.") from None


def _shelf(chosen: argparse.Namespace) -> Shelf:
    omega = opened(chosen, make=chosen.verb == "put")
    shelf: Shelf = omega.models if chosen.shelf == "models" else omega.datasets
    return shelf


def _matching(shelf: Shelf, pattern: str, force: bool) -> Sequence[str]:
    """The names that a glob means; anything else is a name."""
    if not set("*?[") & set(pattern):
        return [pattern]
    names = shelf.list(pattern, hidden=True)
    if not names and not force:
        raise NotFoundError(what=shelf.shelf.rstrip("s"), name=pattern, available=shelf.list())
    return names


def _attribute(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise ConfigError(f"--attribute {text}: expected KEY=VALUE.")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _is_archive(path: Path) -> bool:
    """Whether `export` wrote it; a .keras file is a zip too, but not one of these."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return "kindler.json" in archive.namelist()


def _free(path: Path, force: bool) -> Path:
    if path.exists() and not (force and path.is_file()):
        hint = "" if path.is_dir() else "\nHint: --force overwrites it."
        raise AlreadyExistsError(f"{str(path)!r} already exists.{hint}", name=str(path))
    return path
