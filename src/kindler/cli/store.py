"""`kindler models`, `kindler datasets` and `kindler store`; and the options that say which store."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kindler.errors import AlreadyExistsError, ConfigError, NotFoundError

if TYPE_CHECKING:
    from kindler.shelves.shelf import Shelf
    from kindler.storage import Store
    from kindler.store import Version

Run: TypeAlias = Callable[[argparse.Namespace], int]

NAMES = "a name, or one of its versions: NAME@3, NAME@tag, NAME^ (the one before the newest)"
_GLOBS = "a name or a quoted glob: '*' matches within one part of a name, '**' across parts"
_FILES = {
    "models": "a .keras, .onnx, .xml, .pt2 or exported file, or a SavedModel's folder",
    "datasets": "a .parquet, .csv, .json, .jsonl, .npy, .npz, .tfrecord or exported file",
}
_TRUSTED = "allow objects that can run code when they are loaded"


def command(
    commands: Any, name: str, what: str, run: Run, *, bucket: bool = True, **values: Any
) -> Callable[..., Any]:
    """Add a command that works on a store; returns what adds its arguments."""
    parser = commands.add_parser(name, help=what)
    parser.set_defaults(run=run, **values)
    where = "URL of the store (default: KINDLER_STORE, or ~/.local/share/kindler/store)"
    parser.add_argument("--store", metavar="URL", help=where)
    if bucket:
        which = "bucket of the store (default: %(default)s)"
        parser.add_argument("--bucket", default="default", metavar="NAME", help=which)
    add: Callable[..., Any] = parser.add_argument
    return add


def opened(chosen: argparse.Namespace, *, make: bool = False) -> Store:
    """The shelves of the bucket. A missing store is created only with `make`, or a mistyped URL would become
    one."""
    from kindler.storage import Store
    from kindler.store import VersionStore

    if not make and not VersionStore.is_there(chosen.store):
        shown = "the default location" if chosen.store is None else repr(chosen.store)
        raise ConfigError(f"there is no store at {shown}.\nHint: `kindler models put` creates one.")
    return Store(chosen.store, bucket=chosen.bucket)


def add_commands(commands: Any) -> None:
    for shelf in _FILES:
        parser = commands.add_parser(shelf, help=f"list, store, fetch, remove and tag {shelf}")
        _add_verbs(parser.add_subparsers(dest="verb", metavar="verb", required=True), shelf)
    parser = commands.add_parser("store", help="verify, sweep, compact and prune a store")
    _add_upkeep(parser.add_subparsers(dest="verb", metavar="verb", required=True))


def _add_verbs(verbs: Any, shelf: str) -> None:
    add = command(verbs, "ls", f"list {shelf}", _list, shelf=shelf)
    add("pattern", nargs="?", default="**", metavar="PATTERN", help=_GLOBS)
    add("--versions", action="store_true", help="list all versions, not only the newest")
    add("--kind", help=f"list only {shelf} of this kind")
    add("--hidden", action="store_true", help="also list names that begin with '.' or '_'")
    add("--json", action="store_true", help="print JSON")

    add = command(verbs, "put", "store a file as the newest version of a name", _put, shelf=shelf)
    add("file", type=Path, metavar="FILE", help=_FILES[shelf])
    add("name", metavar="NAME", help="the name, without a version")
    add("--tag", action="append", metavar="TAG", help="tag the new version; repeatable")
    add("--kind", help="kind to store the file as, if several apply")
    attribute = "attribute of the version; VALUE is JSON, else text; repeatable"
    add("--attribute", action="append", default=[], metavar="KEY=VALUE", help=attribute)
    add("--trusted", action="store_true", help=_TRUSTED)
    if shelf == "datasets":
        modes = ["fail", "replace", "append"]
        add("--mode", choices=modes, default="fail", help="if the name exists (default: %(default)s)")

    add = command(verbs, "get", "write a version to a file or a folder", _get, shelf=shelf)
    add("name", metavar="NAME", help=NAMES)
    if shelf == "models":
        add("path", type=Path, metavar="PATH", help="a file for a model that is one file, else a new folder")
        formats = "the model's own files, one file that `put` accepts, or an MLflow model (default: files)"
        add("--format", choices=["files", "archive", "mlflow"], default="files", help=formats)
    else:
        path = "a .parquet, .csv, .json, .jsonl, .npy, .npz or .tfrecord file; - prints CSV, or JSON"
        add("path", metavar="FILE", help=path)
        add("--columns", metavar="A,B", help="only these columns of a table")
        formats = "the format of the file's extension, or one file that `put` accepts (default: %(default)s)"
        add("--format", choices=["auto", "archive"], default="auto", help=formats)
    add("--force", action="store_true", help="overwrite an existing file")
    add("--trusted", action="store_true", help=_TRUSTED)

    add = command(verbs, "rm", "remove names, or single versions of them", _remove, shelf=shelf)
    add("names", nargs="+", metavar="NAME", help=f"{NAMES}; or {_GLOBS}")
    add("--force", action="store_true", help="do not fail if there is nothing to remove")

    add = command(verbs, "tag", "point a tag at a version, or show the tags of a name", _tag, shelf=shelf)
    add("name", metavar="NAME", help=NAMES)
    add("tag", nargs="?", metavar="TAG", help="the tag; it moves if it exists")
    add("--remove", action="store_true", help="remove the tag instead")
    if shelf != "models":
        return

    add = command(verbs, "show", "show a version and what made it", _show, shelf=shelf)
    add("name", metavar="NAME", help=NAMES)
    formats = "text, JSON with all that is known, OpenLineage events (one a line), or a model card"
    choices = ["text", "json", "openlineage", "card"]
    add("--format", choices=choices, default="text", help=f"{formats} (default: %(default)s)")

    what = "train a version again from its record, and compare weights and metrics to the bit"
    add = command(verbs, "reproduce", what, _reproduce, shelf=shelf)
    add("name", metavar="NAME", help=NAMES)
    paths = "Parquet files, a folder or a table to train from instead of the recorded files"
    add("--data", metavar="PATH", help=paths)
    add("--validation-data", metavar="PATH", help="the same to validate with")
    add("--seed", type=int, metavar="N", help="another seed than the recorded one")
    add("--workers", type=int, metavar="N", help="another number of workers")
    add("--trusted", action="store_true", help="run the code of the recipe, without which nothing is trained")

    what = "train by a version's recipe on newer data, compare both, and tag the new version"
    add = command(verbs, "retrain", what, _retrain, shelf=shelf)
    add("name", metavar="NAME", help=NAMES)
    add("--holdout", metavar="PATH", required=True, help="Parquet files to evaluate both versions on")
    add("--data", metavar="PATH", help="Parquet files to train from instead of the recorded paths")
    add("--since", metavar="TIME", help="only files written after this time, such as 2026-01-31T12:00")
    add("--tag", default="candidate", metavar="TAG", help="tag for the new version (default: %(default)s)")
    add("--trusted", action="store_true", help="run the code of the recipe, without which nothing is trained")

    add = command(verbs, "split", "divide a tag's requests among versions, or show how", _split, shelf=shelf)
    add("name", metavar="NAME@TAG", help="the tag; a name alone shows all of its splits")
    shares = {
        "--canary": "let this version answer a share of the requests, such as 4=0.1; repeatable",
        "--shadow": "mirror a share of the requests to this version; responses are discarded; repeatable",
    }
    for option, text in shares.items():
        add(option, action="append", default=[], metavar="VERSION=SHARE", help=text)
    add("--clear", action="store_true", help="send all requests to the tag's own version")


def _add_upkeep(verbs: Any) -> None:
    command(verbs, "verify", "check all stored bytes against their hashes", _verify)
    command(verbs, "compact", "reclaim the space of removed catalog rows", _compact)

    add = command(verbs, "sweep", "remove the bytes of dropped versions and of killed processes", _sweep)
    grace = "keep bytes written in the last N seconds (default: %(default)g)"
    add("--grace-s", type=float, default=3600.0, metavar="N", help=grace)

    add = command(verbs, "prune", "remove old versions; the newest and tagged ones stay", _prune)
    add("pattern", nargs="?", default="**", metavar="PATTERN", help="a quoted glob of names")
    shelves = ["models", "datasets", "scripts"]
    add("--shelf", choices=shelves, default="models", help="where (default: %(default)s)")
    add("--keep", type=int, metavar="N", help="keep the newest N versions of each name")
    add("--days", type=float, metavar="N", help="keep versions younger than N days")
    add("--dry-run", action="store_true", help="only print what would be removed")


def _list(chosen: argparse.Namespace) -> int:
    shelf = _shelf(chosen)
    versions = shelf.newest(chosen.pattern, hidden=chosen.hidden, kind=chosen.kind)
    if chosen.versions:
        versions = [one for v in versions for one in shelf.versions(v.name)]
    all_tags = shelf.store.all_tags(shelf.bucket, shelf.shelf)
    rows: list[dict[str, Any]] = [
        {
            "name": v.name,
            "version": v.number,
            "kind": v.kind,
            "size": v.size,
            "created": v.created.isoformat(),
            "tags": sorted(tag for tag, number in all_tags.get(v.name, {}).items() if number == v.number),
            "attributes": dict(v.attributes),
        }
        for v in versions
    ]
    if chosen.json:
        print(json.dumps(rows, indent=2))
        return 0
    lines: list[tuple[str, ...]] = [("NAME", "VERSION", "KIND", "SIZE", "CREATED", "TAGS")]
    for v, row in zip(versions, rows, strict=True):
        created = f"{v.created.astimezone():%Y-%m-%d %H:%M}"
        lines.append((v.name, str(v.number), v.kind, _size(v.size), created, " ".join(row["tags"])))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.rjust(width) if i in (1, 3) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    return 0


def _size(size: int) -> str:
    value: float = size
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


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

    target = None if chosen.path == "-" else _free(Path(chosen.path), chosen.force)
    if version.kind == "tfrecord" and target is not None and target.suffix in (".tfrecord", ".tfrecords"):
        with tempfile.TemporaryDirectory(prefix="kindler-get-") as folder, target.open("wb") as file:
            copied = shelf.get(str(version), local=Path(folder) / "files")
            for part in sorted(copied.iterdir()):  # one after the other, they are a file of records
                file.write(part.read_bytes())
        return
    options: dict[str, Any] = {"as_": "arrow"} if version.kind in ("parquet", "tfrecord") else {}
    if chosen.columns:
        options["columns"] = chosen.columns.split(",")
    write(shelf.get(str(version), trusted=chosen.trusted, **options), target)


def _show(chosen: argparse.Namespace) -> int:
    from kindler.shelves import lineage

    shelf = _shelf(chosen)
    version = shelf.metadata(chosen.name)
    tags = sorted(tag for tag, number in shelf.tags(version.name).items() if number == version.number)
    if chosen.format == "json":
        facts = {
            **{key: getattr(version, key) for key in ("bucket", "name", "kind", "size", "digest")},
            "version": version.number,
            "created": version.created.isoformat(),
            "tags": tags,
            "attributes": dict(version.attributes),
            "lineage": lineage.fits(version),
        }
        print(json.dumps(facts, indent=2))
    elif chosen.format == "openlineage":
        for event in lineage.openlineage(version):
            print(json.dumps(event))
    else:
        form = lineage.model_card if chosen.format == "card" else lineage.shown
        print(form(version, tags).rstrip())
    return 0


def _reproduce(chosen: argparse.Namespace) -> int:
    models: Any = _shelf(chosen)
    sys.path.append(os.getcwd())  # modules of the user's own, which a script beside them found, too
    options = {key: getattr(chosen, key) for key in ("trusted", "data", "validation_data", "seed", "workers")}
    result = models.reproduce(chosen.name, **options)
    print(result)
    return 0 if result.equal else 1


def _retrain(chosen: argparse.Namespace) -> int:
    models: Any = _shelf(chosen)
    sys.path.append(os.getcwd())
    try:
        since = None if chosen.since is None else datetime.fromisoformat(chosen.since)
    except ValueError:
        raise ConfigError(f"--since {chosen.since}: expected a time, such as 2026-01-31T12:00.") from None
    options = {key: getattr(chosen, key) for key in ("holdout", "data", "tag", "trusted")}
    result = models.retrain(chosen.name, since=since, **options)
    print(result)
    share = f"{result.version.number}=0.1"
    print(
        f"to send it a tenth of the requests: kindler models split {result.version.name}@TAG --canary {share}"
    )
    return 0


def _remove(chosen: argparse.Namespace) -> int:
    shelf = _shelf(chosen)
    names = [name for pattern in chosen.names for name in _matching(shelf, pattern, chosen.force)]
    for name in names:
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
    shares = {what: dict(map(_share, getattr(chosen, what))) for what in ("canary", "shadow")}
    if any(shares.values()) or chosen.clear:
        if any(shares.values()) and chosen.clear:
            raise ConfigError("--clear removes the shares; --canary and --shadow set them.")
        models.split(chosen.name, **shares)
    name, _, tag = chosen.name.partition("@")
    models.metadata(chosen.name)
    for split in models.splits(name).values():
        if tag in ("", split.tag):
            shown = [f"canary {number}={share:g}" for number, share in split.canary.items()]
            shown += [f"shadow {number}={share:g}" for number, share in split.shadow.items()]
            print(f"{name}@{split.tag} {' '.join(shown)}")
    return 0


def _share(text: str) -> tuple[int, float]:
    number, _, share = text.partition("=")
    try:
        return int(number), float(share)
    except ValueError:
        raise ConfigError(f"{text!r}: expected VERSION=SHARE, such as 4=0.1.") from None


def _shelf(chosen: argparse.Namespace) -> Shelf:
    shelf: Shelf = getattr(opened(chosen, make=chosen.verb == "put"), chosen.shelf)
    return shelf


def _matching(shelf: Shelf, pattern: str, force: bool) -> Sequence[str]:
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


def _verify(chosen: argparse.Namespace) -> int:
    verified = opened(chosen).verify()
    for damage in verified.damaged:
        print(f"{damage.sha256}: {damage.problem}; needed by {', '.join(damage.versions)}")
    print(f"{verified.blobs} blobs read, {len(verified.damaged)} damaged")
    return 1 if verified.damaged else 0


def _sweep(chosen: argparse.Namespace) -> int:
    if not chosen.grace_s >= 0:
        raise ConfigError(f"--grace-s {chosen.grace_s:g}: must be 0 or more.")
    swept = opened(chosen).sweep(chosen.grace_s)
    print(f"{swept.blobs} blobs and {swept.folders} folders removed")
    return 0


def _compact(chosen: argparse.Namespace) -> int:
    before, after = opened(chosen).store.compact()
    print(f"catalog: {_size(before)} -> {_size(after)}" if before else "catalog compacted")
    return 0


def _prune(chosen: argparse.Namespace) -> int:
    if chosen.keep is None and chosen.days is None:
        raise ConfigError("prune needs --keep or --days, or both: the versions to keep.")
    shelf = getattr(opened(chosen), chosen.shelf)
    for name in shelf.prune(chosen.pattern, keep=chosen.keep, days=chosen.days, dry_run=chosen.dry_run):
        print(name)
    return 0
