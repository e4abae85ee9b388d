"""Where models that are served compute; GPUs are made up, and a plug-in kind stands in for a framework."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kindler import Store
from kindler.cli.serve import _devices
from kindler.engine.placement import VISIBLE_GPUS
from kindler.errors import ConfigError
from kindler.models.loaded import wrap
from kindler.serve.model_loading import DevicePlacement, Devices, start_of
from kindler.serve.model_process import described, description
from kindler.serve.settings import ServeSettings
from kindler.store import Version
from tests.serve.served import ROOT, linear, serving

PLUGINS = ROOT / "tests" / "plugins"


@pytest.fixture
def weighted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(PLUGINS))
    yield importlib.import_module("toy_models").WeightedSum([1, 2])
    sys.modules.pop("toy_models", None)


@pytest.fixture
def versions(tmp_path: Path, weighted: Any) -> dict[str, Version]:
    om = Store(tmp_path / "store")
    made = {
        "toy": om.models.put(weighted, "toy"),
        "stored": om.models.put(weighted, "stored", attributes={"device": "cuda:1"}),
        "modest": om.models.put(weighted, "modest", attributes={"device": "cpu"}),
        "wrong": om.models.put(weighted, "wrong", attributes={"device": "tpu"}),
        "line": om.models.put(linear(), "line"),
        "own": om.models.put(os.path.join, "own"),
    }
    om.close()
    return made


def settled(monkeypatch: pytest.MonkeyPatch, gpus: str, **settings: Any) -> Devices:
    monkeypatch.setenv(VISIBLE_GPUS, gpus)
    return Devices(ServeSettings(**settings))


def test_a_model_gets_the_gpu_of_which_models_take_the_least_memory_and_sees_no_other(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, Version]
) -> None:
    devices = settled(monkeypatch, "6,GPU-b")

    first, second = (devices.place(versions["toy"], {}) for _ in range(2))
    assert [place.gpu for place in (first, second)] == [0, 1]  # both are still being loaded
    assert (first.asked, dict(first.environment)[VISIBLE_GPUS]) == ("auto", "6")
    assert dict(second.environment)[VISIBLE_GPUS] == "GPU-b"
    assert devices.place(versions["toy"], {0: 5, 1: 4}).gpu == 1
    assert start_of(versions["toy"], ServeSettings(), first, None)[1] == 2
    assert [second.name(device) for device in ("cuda", "cpu")] == ["cuda:1", "cpu"]


def test_kinds_that_cannot_use_a_gpu_are_given_none_and_code_of_the_users_own_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, Version]
) -> None:
    devices = settled(monkeypatch, "0")
    line, own = (devices.place(versions[name], {}) for name in ("line", "own"))

    assert line == DevicePlacement()
    assert line.name(None) == "cpu"
    assert own.name(None) is None
    assert own.environment == ()


def test_what_the_server_says_of_a_name_comes_before_what_was_stored_with_it(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, Version]
) -> None:
    devices = settled(monkeypatch, "0,1", devices={"toy": "cpu"})
    assert dict(devices.place(versions["toy"], {}).environment) == {VISIBLE_GPUS: ""}
    assert devices.place(versions["stored"], {}).gpu == 1
    assert devices.place(versions["modest"], {}).asked == "cpu"
    # Whoever stores a model cannot take a GPU that the server keeps from models.
    assert settled(monkeypatch, "0,1", device="cpu").place(versions["stored"], {}).gpu is None
    assert settled(monkeypatch, "0,1", device="cuda:0").place(versions["stored"], {}).gpu == 0
    with pytest.raises(ConfigError, match="device='tpu'; it must be 'auto', 'cpu'"):
        devices.place(versions["wrong"], {})


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, Version]
) -> None:
    for options in ({"device": "cuda:2"}, {"devices": {"toy": "cuda:2"}}):
        with pytest.raises(ConfigError, match="'cuda:2' was requested.*are: cuda:0, cuda:1"):
            settled(monkeypatch, "3,4", **options)
    with pytest.raises(ConfigError, match="'cuda' was requested; the GPUs of this server are: none"):
        settled(monkeypatch, "", device="cuda")
    with pytest.raises(ConfigError, match="'cuda:1' was requested.*are: none"):
        settled(monkeypatch, "").place(versions["stored"], {})
    assert (
        settled(monkeypatch, "").place(versions["toy"], {}) == DevicePlacement()
    )  # auto is content with the CPU


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", ""])
def test_words_that_are_no_device_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="must be 'auto', 'cpu', 'cuda' or 'cuda:N'"):
        ServeSettings(device=device)
    with pytest.raises(ConfigError, match="device of 'net' must be"):
        ServeSettings(devices={"net": device})


def test_models_of_one_process_have_no_device_of_their_own() -> None:
    with pytest.raises(ConfigError, match="isolation='none' leaves the device to each framework"):
        ServeSettings(isolation="none", device="cuda")


def test_the_option_is_for_all_models_or_for_one() -> None:
    given = ["cuda", "a=b=cpu", "net=cuda:1"]
    assert _devices(given) == {"device": "cuda", "devices": {"a=b": "cpu", "net": "cuda:1"}}
    assert _devices([]) == {"device": "auto", "devices": {}}
    with pytest.raises(ConfigError, match="set 2 times for all models: cpu, cuda"):
        _devices(["cpu", "cuda"])


def test_a_process_that_lies_about_its_device_is_not_believed(weighted: Any) -> None:
    kind = importlib.import_module("toy_models").ToyKind()
    told = description(kind.predictor(weighted), {"predict": True})
    assert described(told).device is None
    assert described({**told, "device": "cuda", "device_bytes": -5}).device_bytes == 0
    for lie in ({"device": "cuda:7"}, {"device": 3}, {"device_bytes": "many"}, {"device_bytes": []}):
        with pytest.raises(ValueError, match=r"device|many|no description"):
            described({**told, **lie})


def test_what_a_process_says_of_its_size_counts_for_nothing() -> None:
    told = description(wrap(linear()).predictor, {"predict": True})
    assert described({**told, "size": 1 << 60}).predictor.size == 0
    told["signature"]["inputs"][0]["shape"] = [1] * 1000
    with pytest.raises(ValueError, match="dimensions"):
        described(told)
    for lie in (None, {}, {"batchable": {}, "methods": ["predict"], "signatures": {}}):
        with pytest.raises(ValueError, match="no description of a model"):
            described(lie)


def test_models_compute_where_they_were_told_and_the_memory_of_each_gpu_is_counted(
    tmp_path: Path, weighted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    om = Store(tmp_path / "store")
    for name in ("anywhere", "first", "second", "third"):
        om.models.put(weighted, name)
    for name in ("line", "strict"):
        om.models.put(linear(), name)
    om.close()
    monkeypatch.setenv(VISIBLE_GPUS, "6,7")
    pinned = [text for name in ("first", "second", "third") for text in ("--device", f"{name}=cuda:1")]
    limit = ("--device-memory-bytes", "2500")
    options = (*pinned, "--device", "strict=cuda", *limit, "--processes", "1")
    with (
        serving(tmp_path / "store", *options, paths=[PLUGINS]) as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):

        def ask(name: str, row: list[float]) -> httpx.Response:
            return client.put(f"/api/v1/model/{name}/predict", json={"data": [row]})

        for name in ("first", "second", "anywhere"):
            assert ask(name, [1.0, 1.0]).status_code == 200
        assert ask("line", [1.0, 1.0, 1.0]).status_code == 200
        refused = ask("strict", [1.0, 1.0, 1.0])
        assert refused.status_code == 503
        assert "'cuda' was requested; models of kind 'sklearn' compute on the CPU" in refused.text

        def loaded() -> dict[str, tuple[str, int]]:
            shown = client.get("/api/v1/stats").json()["loaded"]
            return {one["name"]: (one["device"], one["device_bytes"]) for one in shown}

        expected = {"anywhere": ("cuda:0", 1006), "second": ("cuda:1", 1007), "line": ("cpu", 0)}
        assert loaded() == {**expected, "first": ("cuda:1", 1007)}
        assert ask("third", [1.0, 1.0]).status_code == 200
        assert loaded() == {**expected, "third": ("cuda:1", 1007)}  # the first was used least recently
        metrics = client.get("/metrics").text
        assert 'kindler_device_bytes{device="cuda:1",model="third",version="1"} 1007.0' in metrics
        assert 'model="first",version="1"} 1007' not in metrics
