"""`kindler submit` and `kindler cluster`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from kindler.errors import ConfigError

_FRAMEWORKS = {"tensorflow": "tensorflow", "torch": "torch", "jax": "jax", "none": None}


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "submit",
        help="run main_fun(args, ctx) of a script on every node of a cluster",
        usage="kindler submit [options] script.py:main_fun [-- args...]",
    )
    parser.set_defaults(run=_submit)
    add = parser.add_argument
    add("program", metavar="script.py:main_fun", help="the script and the function in it")
    add("args", nargs="*", help="arguments of main_fun, as a list, after --")
    add("--workers", type=int, default=1, metavar="N", help="nodes that train (default: 1)")
    add("--ps", type=int, default=0, metavar="N", help="parameter servers (default: 0)")
    add("--evaluator", action="store_true", help="also start an evaluator")
    add("--no-chief", action="store_true", help="all nodes that train are workers")
    framework = "framework to load and to set up the environment for, before main_fun (default: %(default)s)"
    add("--framework", choices=tuple(_FRAMEWORKS), default="tensorflow", help=framework)
    mode = "whether main_fun reads its own data or Spark feeds it (default: %(default)s)"
    add("--input-mode", choices=("program", "spark"), default="program", help=mode)
    add("--train", metavar="PATH", help="Parquet files to feed, with --input-mode spark")
    add("--epochs", type=int, default=1, metavar="N", help="how often to feed them (default: 1)")
    master = "a Spark master, or sc://host (default: processes of this machine)"
    add("--master", metavar="URL", help=master)
    start = "time for all nodes to start (default: %(default)g)"
    add("--start-timeout", type=float, default=120.0, metavar="SECONDS", help=start)

    parser = commands.add_parser("cluster", help="a standalone Spark cluster on this machine")
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    up = actions.add_parser("up", help="start a master and workers")
    up.add_argument("--workers", type=int, default=2, metavar="N", help="workers (default: 2)")
    up.add_argument("--cores", type=int, default=1, metavar="N", help="cores of each worker (default: 1)")
    up.add_argument("--memory", default="1g", metavar="SIZE", help="memory of each worker (default: 1g)")
    up.add_argument("--port", type=int, default=0, metavar="N", help="the master's port (default: any)")
    up.set_defaults(run=_up)
    actions.add_parser("down", help="stop it").set_defaults(run=_down)
    actions.add_parser("status", help="show its address and processes").set_defaults(run=_status)
    folder = "folder of its logs (default: in the user's data directory)"
    for action in actions.choices.values():
        action.add_argument("--folder", metavar="PATH", help=folder)


def _submit(chosen: argparse.Namespace) -> int:
    from kindler import cluster

    if (chosen.input_mode == "spark") != (chosen.train is not None):
        raise ConfigError("--input-mode spark needs --train PATH, the rows to feed, and --train needs it.")
    function = _loaded(chosen.program, by_value=chosen.master is not None and "local" not in chosen.master)
    spark = None
    if chosen.master is not None:
        from kindler.spark.session import init

        spark = init(master=chosen.master)
    with cluster.run(
        function,
        chosen.args,
        chosen.workers,
        spark=spark,
        ps=chosen.ps,
        chief=not chosen.no_chief,
        evaluator=chosen.evaluator,
        framework=_FRAMEWORKS[chosen.framework],
        input_mode=chosen.input_mode,
        start_timeout_s=chosen.start_timeout,
    ) as running:
        if chosen.train is not None:
            running.train(_rows(chosen.train, spark), chosen.epochs)
    return 0


def _loaded(program: str, *, by_value: bool) -> Any:
    """The function of a script, which nodes import too, or get by value where they may not have the file."""
    script, _, name = program.rpartition(":")
    path = Path(script).resolve()
    if not script or path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"{program!r}: expected a file and a function in it, like train.py:main_fun.")
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    if Path(module.__file__ or "").resolve() != path:
        raise ConfigError(f"{path}: another module has the name {path.stem!r}.\nHint: rename the script.")
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{path} has no function {name!r}.")
    if by_value:
        _send_along(path.parent)
    return function


def _send_along(folder: Path) -> None:
    """Have the script travel to the nodes, and with it what it has imported from its folder."""
    import cloudpickle

    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is not None and module.__name__ != "__main__" and Path(file).resolve().parent == folder:
            cloudpickle.register_pickle_by_value(module)


def _rows(path: str, spark: Any) -> Any:
    if spark is not None:
        return spark.read.parquet(path)
    import pyarrow.parquet as pq

    return pq.read_table(path)


def _folder(chosen: argparse.Namespace) -> Path:
    if chosen.folder is not None:
        return Path(chosen.folder).resolve()
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "kindler" / "spark-cluster"


def _up(chosen: argparse.Namespace) -> int:
    from kindler.spark.standalone import up

    sizes = {name: getattr(chosen, name) for name in ("workers", "cores", "memory", "port")}
    print(up(_folder(chosen), **sizes).address)
    return 0


def _down(chosen: argparse.Namespace) -> int:
    from kindler.spark.standalone import down

    print(f"{down(_folder(chosen))} processes ended")
    return 0


def _status(chosen: argparse.Namespace) -> int:
    from kindler.spark.standalone import status

    cluster = status(_folder(chosen))
    if cluster is None:
        print("no cluster is running")
        return 1
    print(cluster.address)
    for daemon in cluster.daemons:
        print(f"{daemon.name:<10} {daemon.pid:>8} {'up' if daemon.is_alive else 'down':<5} {daemon.log}")
    return 0
