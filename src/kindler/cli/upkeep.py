"""`kindler store`: verify, sweep, compact and prune a store."""

from __future__ import annotations

import argparse
from typing import Any

from kindler.cli.opened_store import add_store, opened, shown_size
from kindler.errors import ConfigError


def add_commands(commands: Any) -> None:
    """Add `kindler store`."""
    parser = commands.add_parser("store", help="verify, sweep, compact and prune a store")
    verbs = parser.add_subparsers(dest="verb", metavar="verb", required=True)
    verifying = verbs.add_parser("verify", help="check all stored bytes against their hashes")
    verifying.set_defaults(run=_verify)
    sweeping = verbs.add_parser("sweep", help="remove the bytes of dropped versions and of killed processes")
    sweeping.add_argument(
        "--grace-s", type=float, default=3600.0, metavar="N",
        help="leave bytes alone that were written in the last N seconds (default: %(default)g)",
    )  # fmt: skip
    sweeping.set_defaults(run=_sweep)
    compacting = verbs.add_parser("compact", help="give back the room that removed rows of the catalog took")
    compacting.set_defaults(run=_compact)
    pruning = verbs.add_parser("prune", help="remove old versions; the newest and tagged ones stay")
    pruning.add_argument("pattern", nargs="?", default="**", metavar="PATTERN", help="a quoted glob of names")
    pruning.add_argument(
        "--shelf", choices=["models", "datasets", "scripts"], default="models",
        help="where (default: %(default)s)",
    )  # fmt: skip
    pruning.add_argument("--keep", type=int, metavar="N", help="keep the newest N versions of each name")
    pruning.add_argument("--days", type=float, metavar="N", help="keep versions younger than N days")
    pruning.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    pruning.set_defaults(run=_prune)
    for verb in verbs.choices.values():
        add_store(verb)


def _verify(chosen: argparse.Namespace) -> int:
    found = opened(chosen).verify()
    for damage in found.damaged:
        print(f"{damage.sha256}: {damage.problem}; needed by {', '.join(damage.versions)}")
    print(f"{found.blobs} blobs read, {len(found.damaged)} damaged")
    return 1 if found.damaged else 0


def _sweep(chosen: argparse.Namespace) -> int:
    if not chosen.grace_s >= 0:
        raise ConfigError(f"--grace-s {chosen.grace_s:g}: must be 0 or more.")
    swept = opened(chosen).sweep(chosen.grace_s)
    print(f"{swept.blobs} blobs and {swept.folders} folders removed")
    return 0


def _compact(chosen: argparse.Namespace) -> int:
    before, after = opened(chosen).store.compact()
    print(f"catalog: {shown_size(before)} -> {shown_size(after)}" if before else "catalog compacted")
    return 0


def _prune(chosen: argparse.Namespace) -> int:
    if chosen.keep is None and chosen.days is None:
        raise ConfigError("prune needs --keep or --days, to say what stays.")
    shelf = getattr(opened(chosen), chosen.shelf)
    for name in shelf.prune(chosen.pattern, keep=chosen.keep, days=chosen.days, dry_run=chosen.dry_run):
        print(name)
    return 0
