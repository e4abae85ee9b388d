"""Records of what made a model: what is kept of files, what is left out, how others' records are shown."""

from __future__ import annotations

import hashlib
import os
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kindler.estimator import lineage
from kindler.estimator.saving import Saving
from kindler.shelves.lineage import model_card, openlineage, shown
from kindler.shelves.reproduction import differences
from kindler.store import Version


def test_credentials_are_left_out() -> None:
    given = {
        "path": "s3://key:secret@bucket/rows.parquet?sig=abc",
        "plan": "Relation jdbc:postgresql://bob:pw@db/x?password=pw then s3://bucket/b",
        "config": {"width": 4, "api_key": "abc", "DB_PASSWORD": "abc", "rate": np.float32(0.5)},
    }

    assert lineage.cleaned(given) == {
        "path": "s3://bucket/rows.parquet",
        "plan": "Relation jdbc:postgresql://db/x then s3://bucket/b",
        "config": {"width": 4, "api_key": "***", "DB_PASSWORD": "***", "rate": 0.5},
    }


def test_arrays_among_the_options_are_text() -> None:
    given = {
        "loss": {"weight": np.array([1.0, 2.0]), "token_weights": np.ones(2)},
        "empty": np.empty(0),
        "no": [],
    }

    assert lineage.cleaned(lineage._without_nothing(given)) == {
        "loss": {"weight": "[1. 2.]", "token_weights": "***"},
        "empty": "[]",
    }


def test_a_fit_whose_record_cannot_be_made_warns_and_has_no_lineage() -> None:
    est: Any = SimpleNamespace(_made_by=lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="not in the lineage of the model, as ZeroDivisionError"):
        Saving._keep_lineage(est, None, None, "")  # type: ignore[arg-type]
    assert est._lineage.fits == ()


def test_files_have_their_size_and_the_hash_of_their_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")

    known = lineage.files_record([str(tmp_path / "a"), str(tmp_path / "gone")])
    assert known["file_count"] == 2
    there, gone = known["files"]
    assert gone == {"path": str(tmp_path / "gone")}
    assert (there["size"], there["hashed"]) == (3, "all")
    assert there["sha256"] == hashlib.sha256(b"abc").hexdigest()


def test_of_too_much_data_both_ends_are_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "_WHOLE_BYTES", 10)
    monkeypatch.setattr(lineage, "_END_BYTES", 4)
    (tmp_path / "a").write_bytes(b"0123----------6789")

    (file,) = lineage.files_record([str(tmp_path / "a")])["files"]
    assert file["hashed"] == "ends"
    assert file["sha256"] == hashlib.sha256(b"01236789").hexdigest()


def test_code_is_named_with_its_commit_and_whether_it_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
        )
        return done.stdout.strip()

    file = tmp_path / "nets.py"
    file.write_text("a = 1\n")
    assert lineage._commit(str(file)) == {}
    git("init")
    git("add", ".")
    git("commit", "-m", "a")

    commit = git("rev-parse", "HEAD")
    assert lineage._commit(str(file)) == {"commit": commit, "changed": False}
    file.write_text("a = 2\n")
    assert lineage._commit(str(file)) == {"commit": commit, "changed": True}


def version(**meta: Any) -> Version:
    return Version(
        bucket="default",
        shelf="models",
        name="net",
        number=1,
        kind="estimator",
        created=datetime(2026, 1, 2, tzinfo=timezone.utc),
        size=3,
        digest="0" * 64,
        files=(),
        meta=meta,
        attributes={},
    )


def test_a_record_of_anybody_is_shown_as_text() -> None:
    hostile = {
        "user": "\x1b[31mred\nnext",
        "data": {"files": ["x"] * 12, "kind": 7},
        "code": [None],
        "seed": 1,
    }

    lines = shown(version(lineage=[hostile, "no record"]), ["prod"]).splitlines()
    assert "\x1b" not in "".join(lines)
    assert "  user          [31mred next" in lines
    assert "  tags         prod" in lines
    assert "  seed         1" in lines
    assert "               ... and 2 more" in lines


def test_a_version_without_a_record_says_so() -> None:
    assert "no record of what made it" in shown(version(lineage={"a": 1}), [])


def test_a_changed_file_package_processor_or_function_is_named() -> None:
    then = {
        "seed": 1,
        "workers": 2,
        "fingerprint": "a",
        "data": {"files": [{"path": "/a", "sha256": "1"}]},
        "packages": {"torch": "2.1", "numpy": "2"},
        "machine": {"processor": "x"},
        "code": [{"name": "nets.net", "sha256": "1"}, {"name": "__main__.loss", "sha256": "1"}],
    }
    now = {
        **then,
        "fingerprint": "b",
        "data": {"files": [{"path": "/a", "sha256": "2"}]},
        "packages": {"torch": "2.2", "numpy": "2"},
        "machine": {"processor": "y"},
        "code": [{"name": "nets.net", "sha256": "2"}, {"name": "__main__.loss", "sha256": "2"}],
    }

    assert list(differences(then, then)) == []
    assert list(differences(then, now)) == [
        "file /a: 1 then, 2 now",
        "fingerprint of the rows: a then, b now",
        "the source of nets.net: 1 then, 2 now",
        "package torch: 2.1 then, 2.2 now",
        "processor: x then, y now",
    ]
    assert list(differences(then, {**now, "seed": 2}))[:2] == [
        "seed: 1 then, 2 now",
        "file /a: 1 then, 2 now",
    ]


FIT = {
    "began": "2026-01-02T03:04:05+00:00",
    "ended": "2026-01-02T03:05:05+00:00",
    "data": {
        "files": [{"path": "/data/a.parquet", "sha256": "ab"}, {"path": "s3://bucket/b", "sha256": "cd"}]
    },
    "metrics": {"val_loss": 0.5},
    "code": [{"name": "nets.net", "commit": "0123456789abcdef"}],
}


def test_events_of_openlineage_have_the_files_as_inputs_and_the_version_as_output() -> None:
    first, *_, start, complete = openlineage(version(lineage=[{**FIT, "seed": 1}, FIT]))
    assert (start["eventType"], complete["eventType"]) == ("START", "COMPLETE")
    assert start["run"]["runId"] == complete["run"]["runId"] != first["run"]["runId"]
    assert complete["run"]["facets"]["parent"]["run"]["runId"] == first["run"]["runId"]
    assert complete["eventTime"] == FIT["ended"]
    assert [(one["namespace"], one["name"]) for one in complete["inputs"]] == [
        ("file", "/data/a.parquet"),
        ("s3://bucket", "/b"),
    ]
    assert complete["inputs"][0]["facets"]["version"]["datasetVersion"] == "ab"
    assert (start["outputs"], complete["outputs"][0]["name"]) == ([], "default/models/net")
    assert complete["outputs"][0]["facets"]["version"]["datasetVersion"] == "1"
    required = {"eventType", "eventTime", "run", "job", "inputs", "outputs", "producer", "schemaURL"}
    assert set(complete) == required


def test_openlineages_own_client_makes_the_same_events() -> None:
    pytest.importorskip("openlineage.client", reason="openlineage-python is not installed")
    from openlineage.client import event_v2, facet_v2
    from openlineage.client.serde import Serde

    def parent(run: Any, job: Any) -> Any:
        own = facet_v2.parent_run
        return own.ParentRunFacet(run=own.Run(**run), job=own.Job(**job))

    kinds: dict[str, Any] = {
        "processing_engine": facet_v2.processing_engine_run.ProcessingEngineRunFacet,
        "nominalTime": facet_v2.nominal_time_run.NominalTimeRunFacet,
        "parent": parent,
        "jobType": facet_v2.job_type_job.JobTypeJobFacet,
        "version": facet_v2.dataset_version_dataset.DatasetVersionDatasetFacet,
        "outputStatistics": facet_v2.output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet,
    }

    def facets(given: dict[str, Any], name: str = "facets") -> dict[str, Any]:
        found = {}
        for key, facet in given.get(name, {}).items():
            rest = {field: value for field, value in facet.items() if not field.startswith("_")}
            made = kinds[key](producer=facet["_producer"], **rest) if key != "parent" else parent(**rest)
            ours, theirs = (url.split("/") for url in (facet["_schemaURL"], made._schemaURL))
            assert [*ours[:5], *ours[6:]] == [*theirs[:5], *theirs[6:]]  # newer clients have newer numbers
            found[key] = made
        return {**{field: value for field, value in given.items() if field != name}, name: found}

    for event in openlineage(version(lineage=[{**FIT, "seed": 1}, FIT])):
        made = event_v2.RunEvent(
            eventType=event_v2.RunState(event["eventType"]),
            eventTime=event["eventTime"],
            run=event_v2.Run(**facets(event["run"])),
            job=event_v2.Job(**facets(event["job"])),
            inputs=[event_v2.InputDataset(**facets(one)) for one in event["inputs"]],
            outputs=[
                event_v2.OutputDataset(**facets(facets(one), "outputFacets")) for one in event["outputs"]
            ],
            producer=event["producer"],
        )
        assert plain(Serde.to_dict(made)) == plain(event)


def plain(event: Any) -> Any:
    """Without empty facets, which the client leaves out, and the addresses of facets, compared above."""
    if isinstance(event, dict):
        kept = {key: plain(value) for key, value in event.items() if key not in ("_producer", "_schemaURL")}
        return {key: value for key, value in kept.items() if value != {}}
    return [plain(one) for one in event] if isinstance(event, list) else event


def test_a_model_card_has_data_code_and_metrics_and_no_markup_of_the_record() -> None:
    card = model_card(version(lineage=[{**FIT, "user": "<b>|x|"}]), ["prod"])

    assert "| Tags | prod |" in card
    assert "/data/a.parquet, s3://bucket/b" in card
    assert "nets.net 0123456789ab" in card
    assert r"| val\_loss | 0.5 |" in card
    assert r"\<b\>\|x\|" in card


@pytest.mark.parametrize("odd", [{"data": 1}, {"data": {"files": [1]}}, {"code": [3], "metrics": []}])
def test_other_forms_take_any_record(odd: Any) -> None:
    assert model_card(version(lineage=[odd]), [])
    assert len(openlineage(version(lineage=[odd]))) == 2
