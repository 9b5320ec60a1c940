"""The Hub: pinned, read in parts, downloaded on a bounded disk, whatever the network does.

The Hub is a server on loopback (hub_server.py); huggingface_hub talks to it as to the real one.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from conftest import Inline, edit_json
from hub_server import Fault, HubServer, Request
from huggingface_hub import constants, snapshot_download
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_fp8 import JobError, SourceError, hub, plan, quantize, validate
from kimi_k3_fp8.checkpoint import find_source, read_checkpoint
from kimi_k3_fp8.errors import EngineError
from kimi_k3_fp8.hub import Shelf, open_repository
from kimi_k3_fp8.staging import Staging

REPO = "moonshotai/Kimi-K3"
#: Small jobs: most read one of the tiny checkpoint's seven shards, some two.
SMALL = "300kB"
REAL_WAITS = hub.WAITS


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A Hub that huggingface_hub uses in this process, with an empty cache and short waits."""
    with HubServer() as server:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "WAITS", (0, 0, 0))
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield server


@pytest.fixture
def commit(server: HubServer, tiny: Path) -> str:
    return server.push(REPO, tiny)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every wait, in seconds, none of which takes any time."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def content_requests(server: HubServer) -> list[Request]:
    return [request for request in server.requests if request.path.startswith(("/cdn/", f"/{REPO}/"))]


def outputs(folder: Path) -> dict[str, bytes]:
    """Every file but the record, which names the source."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "kimi_k3_fp8.json"
    }


def convert(out: Path, executor: Executor | None = None, **more: Any) -> Any:
    options: dict[str, Any] = {"max_shard_size": SMALL, "progress": False, "prefetch": 2}
    return quantize(REPO, out, executor=executor or Inline(), card=False, **(options | more))


@pytest.fixture(scope="session")
def local(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run from a folder makes of the tiny checkpoint."""
    out = tmp_path_factory.mktemp("local") / "output"
    quantize(tiny, out, max_shard_size=SMALL, executor=Inline(), card=False, progress=False)
    return outputs(out)


# --- planning and validating without a download


def test_plan_fetches_the_headers_the_config_and_the_index_and_nothing_else(
    server: HubServer, commit: str, tiny: Path
) -> None:
    planned = plan(REPO, max_shard_size=SMALL)
    from_folder = plan(tiny, max_shard_size=SMALL)
    assert planned.jobs == from_folder.jobs
    assert planned.modules == from_folder.modules
    assert [p for p in planned.problems if p.code != "left-out"] == [
        p for p in from_folder.problems if p.code != "left-out"
    ]
    assert planned.checkpoint.source == f"{REPO}@{commit}"

    headers = sum(map(header_bytes, shards(tiny)))
    texts = sum((tiny / name).stat().st_size for name in ("config.json", "model.safetensors.index.json"))
    assert sum(request.sent for request in content_requests(server)) == headers + texts
    # Of each shard the length of the header and the header: two requests, each redirected once.
    assert server.sent(where="/cdn/") == headers
    assert len([r for r in server.requests if "/cdn/" in r.path]) == 2 * len(shards(tiny))
    # Commit and lists of files: a few hundred bytes a file.
    lists = server.sent(where="/api/models/")
    assert lists <= 1000 * len([*tiny.iterdir()])
    # A second plan finds config and index in the cache.
    before = sum(request.sent for request in content_requests(server))
    plan(REPO, max_shard_size=SMALL)
    assert sum(request.sent for request in content_requests(server)) - before == headers


def test_validate_fetches_headers_and_small_json_files(server: HubServer, converted: Path) -> None:
    server.push("org/fp8", converted)
    report = validate("org/fp8", level="tensors")
    assert report.ok, report
    assert report.tensors == validate(converted).tensors
    texts = sum(path.stat().st_size for path in converted.glob("*.json"))
    sent = sum(request.sent for request in server.requests if not request.path.startswith("/api/"))
    assert sum(map(header_bytes, shards(converted))) < sent
    assert sent <= sum(map(header_bytes, shards(converted))) + texts


def test_only_the_hub_sees_the_token(server: HubServer, commit: str) -> None:
    plan(REPO)
    hub_host, cdn = "127.0.0.1", "localhost"
    assert {(r.host, r.authorization) for r in server.requests} == {
        (hub_host, "Bearer hf_secret"),
        (cdn, None),
    }


def test_a_shard_whose_size_disagrees_with_its_header_is_a_problem(server: HubServer, source: Path) -> None:
    path = shards(source)[2]
    path.write_bytes(path.read_bytes()[:-1])
    server.push(REPO, source)
    problems = {(p.code, p.subject) for p in plan(REPO).problems}
    assert ("shard-truncated", path.name) in problems


def test_a_server_that_knows_no_ranges_is_read_all_the_same(
    server: HubServer, commit: str, tiny: Path
) -> None:
    path = shards(tiny)[0]
    server.faults = [Fault("/cdn/", whole=True, times=10)]
    files = open_repository(REPO)
    assert files.read(path.name, 100, 50) == path.read_bytes()[100:150]
    files.download(path.name, tiny.parent / "shelf" / "copy")
    assert (tiny.parent / "shelf" / "copy").read_bytes() == path.read_bytes()


# --- what is named, and what is not there


def test_a_commit_is_resolved_once_and_can_travel(server: HubServer, commit: str, source: Path) -> None:
    files = pickle.loads(pickle.dumps(open_repository(REPO)))
    (source / "config.json").write_text("{}")
    moved = server.push(REPO, source)
    assert moved != commit
    before = len(server.requests)
    assert json.loads(files.read("config.json"))["model_type"] == "kimi_k3"
    assert all(commit in r.path or "/cdn/" in r.path for r in server.requests[before:])
    assert open_repository(REPO).commit == moved
    assert open_repository(REPO, commit).commit == commit
    assert open_repository(REPO, commit).files == files.files


def test_identity_follows_contents_not_commits(server: HubServer, commit: str, source: Path) -> None:
    before = read_checkpoint(open_repository(REPO)).identity()
    (source / "README.md").write_text("another card")
    assert server.push(REPO, source) != commit
    assert read_checkpoint(open_repository(REPO)).identity() == before
    path = shards(source)[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    server.push(REPO, source)
    after = read_checkpoint(open_repository(REPO)).identity()
    assert {name for name in before if before[name] != after[name]} == {path.name}


@pytest.mark.parametrize(
    ("spoil", "source_id", "revision", "words"),
    [
        (None, "no/such", None, ["no such repository", "no such local folder", "hf auth login"]),
        (None, REPO, "v9", ["v9", "does not have this revision"]),
        (lambda s: s.gated.add(REPO), REPO, None, ["accept its terms", "hf auth login"]),
        (
            lambda s: s.__exit__(None, None, None),
            REPO,
            None,
            ["does not deliver", "connection", "HF_ENDPOINT"],
        ),
        (lambda s: s.faults.append(Fault("/api/", status=503, times=99)), REPO, None, ["503", "call again"]),
    ],
    ids=["repository", "revision", "gated", "no-network", "down"],
)
def test_what_cannot_be_opened_says_what_to_do(
    server: HubServer, commit: str, spoil: Any, source_id: str, revision: str | None, words: list[str]
) -> None:
    if spoil is not None:
        spoil(server)
    with pytest.raises(SourceError) as caught:
        plan(source_id, revision=revision)
    for word in (source_id, *words):
        assert word in str(caught.value)


def test_a_folder_comes_before_a_repository_and_has_no_revision(
    server: HubServer, commit: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny, tmp_path / REPO)
    monkeypatch.chdir(tmp_path)
    assert find_source(REPO).source == str(tmp_path / REPO)
    assert not server.requests
    with pytest.raises(ValueError, match="revision"):
        find_source(REPO, "main")
    with pytest.raises(SourceError, match="does not exist"):
        find_source("/no/such/folder")


# --- offline and cached


def test_offline_with_a_full_snapshot_is_as_good_as_online(
    server: HubServer, commit: str, offline: Callable[[], None], tmp_path: Path, local: dict[str, bytes]
) -> None:
    online = plan(REPO, max_shard_size=SMALL)
    snapshot_download(REPO)
    offline()
    server.requests.clear()
    planned = plan(REPO, max_shard_size=SMALL)
    assert planned.jobs == online.jobs
    assert planned.record() == online.record()
    convert(tmp_path / "out")
    assert outputs(tmp_path / "out") == local
    assert server.requests == []
    assert open_repository(REPO, commit).commit == commit


def test_offline_with_a_snapshot_that_says_not_what_it_should_hold(
    server: HubServer, commit: str, tmp_path: Path
) -> None:
    """Older releases of huggingface_hub kept no list of files."""
    online = plan(REPO).jobs
    snapshot_download(REPO)
    shutil.rmtree(tmp_path / "cache" / "models--moonshotai--Kimi-K3" / "trees")
    # In a fresh process: huggingface_hub remembers the list of files in this one.
    planned = subprocess_plan(server, tmp_path, HF_HUB_OFFLINE="1")
    assert planned == (len(online), f"{REPO}@{commit}")


@pytest.mark.parametrize("whole", [False, True], ids=["nothing", "not-whole"])
def test_offline_without_a_full_snapshot_is_a_clear_error(
    server: HubServer, commit: str, offline: Callable[[], None], whole: bool
) -> None:
    if whole:
        plan(REPO)
    offline()
    with pytest.raises(SourceError, match="cache") as caught:
        plan(REPO)
    assert "online" in str(caught.value) or "HF_HUB_OFFLINE" in str(caught.value)


def subprocess_plan(server: HubServer, tmp_path: Path, **environment: str) -> tuple[int, str]:
    """A plan in a fresh process, which knows of the server only by the environment."""
    code = (
        "import json; from kimi_k3_fp8 import plan; p = plan('moonshotai/Kimi-K3');"
        "print(json.dumps([len(p.jobs), p.checkpoint.source]))"
    )
    settings = {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_TOKEN": "hf_other"}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | settings | environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    jobs, source = json.loads(ran.stdout.splitlines()[-1])
    if "HF_HUB_OFFLINE" not in environment:
        assert "reading moonshotai/Kimi-K3" in ran.stderr  # the progress bar
    return jobs, source


def test_the_environment_is_honoured(server: HubServer, commit: str, tiny: Path, tmp_path: Path) -> None:
    server.requests.clear()
    assert subprocess_plan(server, tmp_path) == (len(plan(tiny).jobs), f"{REPO}@{commit}")
    assert {request.authorization for request in server.requests} == {"Bearer hf_other", None}
    assert (tmp_path / "cache" / "models--moonshotai--Kimi-K3" / "refs" / "main").read_text() == commit


def test_what_the_cache_holds_is_used_where_it_lies(
    server: HubServer, commit: str, tiny: Path, tmp_path: Path, local: dict[str, bytes]
) -> None:
    held = [path.name for path in shards(tiny)[:3]]
    snapshot = Path(snapshot_download(REPO, allow_patterns=held))
    server.requests.clear()
    convert(tmp_path / "out", keep_source=False)
    assert outputs(tmp_path / "out") == local
    rest = [path for path in shards(tiny) if path.name not in held]
    assert server.sent(where="/cdn/") == sum(path.stat().st_size + header_bytes(path) for path in rest)
    assert [path.name for path in shards(snapshot)] == held


# --- quantize on a bounded disk


class Watch:
    """Counts the source shards on disk, in part or whole, at each request and at each job."""

    def __init__(self, server: HubServer, out: Path) -> None:
        self.folder, self.counts = Staging.beside(out).source, [0]
        server.on_request = self.look

    def look(self, request: Request | None = None) -> None:
        files = [p for p in self.folder.rglob("*") if p.is_file() and not p.is_symlink()]
        self.counts.append(len(files))


class Watched(Executor):
    """Two jobs at a time in threads, and a look at the disk when each begins and ends."""

    def __init__(self, watch: Watch) -> None:
        self.pool, self.lock, self.watch = ThreadPoolExecutor(2), threading.Lock(), watch

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.pool.submit(self._run, fn, *args)

    def _run(self, fn: Any, *args: Any) -> Any:
        self.watch.look()
        with self.lock:  # LLM Compressor is not meant for two threads
            result = fn(*args)
        self.watch.look()
        return result


@pytest.mark.parametrize("prefetch", [2, 3])
def test_never_more_source_shards_on_disk_than_prefetch(
    server: HubServer, commit: str, tiny: Path, tmp_path: Path, local: dict[str, bytes], prefetch: int
) -> None:
    out = tmp_path / "out"
    watch = Watch(server, out)
    report = convert(out, Watched(watch), keep_source=False, prefetch=prefetch)
    assert report.ok
    assert outputs(out) == local
    assert max(watch.counts) == prefetch
    # Each shard came once, and nothing of them is left anywhere.
    assert server.sent(where="/cdn/") == sum(p.stat().st_size + header_bytes(p) for p in shards(tiny))
    assert not [*(tmp_path / "cache").rglob("*.safetensors")]
    assert not Staging.beside(out).path.exists()


def test_keep_source_leaves_the_shards_in_the_cache(
    server: HubServer, commit: str, tiny: Path, tmp_path: Path, local: dict[str, bytes]
) -> None:
    convert(tmp_path / "out")
    assert outputs(tmp_path / "out") == local
    snapshot = Path(snapshot_download(REPO, local_files_only=True))  # raises if it is not whole
    assert {p.name: p.read_bytes() for p in snapshot.iterdir()} == {
        p.name: p.read_bytes() for p in tiny.iterdir()
    }
    server.requests.clear()
    convert(tmp_path / "again", keep_source=False)
    assert server.sent(where="/cdn/") == 0


def test_fewer_places_than_one_job_needs_is_said_beforehand(server: HubServer, commit: str) -> None:
    planned = plan(REPO, max_shard_size="1MB", prefetch=2)
    largest = max(len(job.source_shards) for job in planned.jobs)
    (problem,) = (p for p in planned.problems if p.severity == "error")
    assert (problem.code, problem.expected, problem.found) == ("prefetch-too-small", largest, 2)
    assert plan(REPO, max_shard_size="1MB", prefetch=largest).ok
    assert plan(REPO, max_shard_size="1MB").ok


# --- when the network fails


FAULTS = {
    "dropped": Fault("/cdn/", cut=1000),
    "dropped-at-once": Fault("/cdn/", cut=0),
    "truncated": Fault("/cdn/", cut=1000, chunked=True),
    "altered": Fault("/cdn/", alter=True),
    "503": Fault("/cdn/", status=503),
    "429": Fault("/cdn/", status=429, headers={"Retry-After": "0"}),
}
#: The requests before the one that carries the bytes: range by range, or once for a file in the cache.
BEFORE = {False: Fault("/resolve/", status=500), True: Fault("/resolve/", method="HEAD", status=503)}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", [*FAULTS, "before"])
def test_a_download_survives(
    server: HubServer, commit: str, tiny: Path, waits: list[float], tmp_path: Path, name: str, keep: bool
) -> None:
    path = shards(tiny)[3]
    files = open_repository(REPO)
    fault = Fault(**vars(FAULTS.get(name, BEFORE[keep])) | {"times": 1 if name == "altered" else 2})
    server.faults = [fault]
    if keep:
        found = files.fetch(path.name)
    else:
        found = tmp_path / "shelf" / path.name
        files.download(path.name, found)
        assert [*found.parent.iterdir()] == [found]
    assert found.read_bytes() == path.read_bytes()
    assert fault.times == 0


def test_a_dropped_download_goes_on_from_its_last_byte(
    server: HubServer, commit: str, tiny: Path, tmp_path: Path
) -> None:
    path = shards(tiny)[0]
    files = open_repository(REPO)
    size = path.stat().st_size
    server.faults = [Fault("/cdn/", cut=size // 2), Fault("/cdn/", status=503, times=99)]
    with pytest.raises(EngineError) as caught:
        files.download(path.name, tmp_path / path.name)
    assert caught.value.subject == path.name
    assert "503" in caught.value.message
    assert "finished jobs are kept" in caught.value.fix
    assert (tmp_path / f"{path.name}.part").read_bytes() == path.read_bytes()[: size // 2]

    server.faults, before = [], server.sent(where="/cdn/")
    files.download(path.name, tmp_path / path.name)
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    assert server.sent(where="/cdn/") - before == size - size // 2


def test_the_server_says_how_long_to_wait(
    server: HubServer, commit: str, tiny: Path, waits: list[float]
) -> None:
    path = shards(tiny)[0]
    files = open_repository(REPO)
    server.faults = [
        Fault("/resolve/", status=429, headers={"Retry-After": "7"}),
        Fault("/resolve/", status=429, headers={"RateLimit": '"resolvers";r=0;t=11'}),
        Fault("/cdn/", cut=3),
    ]
    assert files.read(path.name, 0, 8) == path.read_bytes()[:8]
    assert waits == [7, 11, 0]


def test_waits_grow_and_end(
    server: HubServer, commit: str, tiny: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shards(tiny)[0]
    files = open_repository(REPO)
    monkeypatch.setattr(hub, "WAITS", REAL_WAITS)
    server.faults = [Fault("/cdn/", cut=0, times=99)]
    with pytest.raises(SourceError, match="does not deliver"):
        files.read(path.name, 0, 8)
    assert tuple(waits) == REAL_WAITS
    assert waits == sorted(waits)
    assert 10 <= sum(waits) <= 120


def test_altered_bytes_never_become_a_file(
    server: HubServer, commit: str, tiny: Path, tmp_path: Path, waits: list[float]
) -> None:
    path = shards(tiny)[0]
    files = open_repository(REPO)
    for attempt in (
        lambda: files.fetch(path.name),
        lambda: files.download(path.name, tmp_path / "shelf" / path.name),
    ):
        server.faults = [Fault("/cdn/", alter=True, times=99)]
        with pytest.raises(EngineError, match="not what the commit lists"):
            attempt()
        server.faults = []
        assert files.cached(path.name) is None
        assert not [*(tmp_path / "shelf").rglob("*")]


class Before(Inline):
    """Does something just before the first job runs."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.acts = [act]

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        while self.acts:
            self.acts.pop()()
        return super().submit(fn, *args, **kwargs)


@pytest.mark.parametrize("keep", [False, True])
def test_a_run_that_loses_the_network_stops_and_goes_on_later(
    server: HubServer, commit: str, tiny: Path, tmp_path: Path, local: dict[str, bytes], keep: bool
) -> None:
    out = tmp_path / "out"
    lost = shards(tiny)[4]
    sha256 = server.commits[REPO][commit][lost.name].sha256
    lose = Before(lambda: server.faults.append(Fault(f"/cdn/{sha256}", status=503, times=99)))
    with pytest.raises(JobError) as caught:
        convert(out, lose, keep_source=keep)
    assert caught.value.subject == lost.name
    assert "503" in str(caught.value)
    assert "finished jobs are kept" in caught.value.fix
    server.faults = []
    jobs = plan(REPO, max_shard_size=SMALL, save_directory=out).jobs
    assert lost.name in jobs[caught.value.job - 1].source_shards
    assert not out.exists()
    kept = {receipt.job for receipt in Staging.beside(out).receipts()}
    assert kept
    assert kept <= {job.number for job in jobs if lost.name not in job.source_shards}

    report = convert(out, keep_source=keep)
    assert report.jobs_kept == len(kept)
    assert outputs(out) == local


def test_a_commit_that_moves_in_the_middle_changes_nothing(
    server: HubServer, commit: str, source: Path, tmp_path: Path, local: dict[str, bytes]
) -> None:
    edit_json(source / "config.json", lambda config: config.update(dtype="float16"))
    for path in shards(source):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    moved: list[str] = []
    move = Before(lambda: moved.append(server.push(REPO, source)))
    convert(tmp_path / "out", move, keep_source=False)
    assert outputs(tmp_path / "out") == local
    assert moved
    assert not [request for request in server.requests if moved[0] in request.path]
    record = json.loads((tmp_path / "out" / "kimi_k3_fp8.json").read_text())
    assert record["source"] == f"{REPO}@{commit}"


def test_a_commit_that_vanishes_is_a_clear_error(server: HubServer, commit: str, tmp_path: Path) -> None:
    vanish = Before(lambda: server.commits[REPO].pop(commit))
    with pytest.raises(JobError, match="does not have it any more"):
        convert(tmp_path / "out", vanish, keep_source=False)
    assert not (tmp_path / "out").exists()


def test_a_run_continues_after_a_commit_that_left_the_weights_alone(
    server: HubServer, commit: str, source: Path, tmp_path: Path, local: dict[str, bytes]
) -> None:
    class Stopping(Inline):
        left = 3

        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return super().submit(fn, *args, **kwargs)

    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "out", Stopping(), keep_source=False)
    (source / "extra.md").write_text("a file more")
    server.push(REPO, source)
    report = convert(tmp_path / "out", keep_source=False)
    assert report.jobs_kept == 3
    assert outputs(tmp_path / "out") == local | {"extra.md": b"a file more"}


KILLED = """
import sys
from conftest import Inline
from kimi_k3_fp8 import quantize

quantize("moonshotai/Kimi-K3", sys.argv[1], executor=Inline(), max_shard_size="300kB",
         keep_source=False, prefetch=2, card=False, progress=False)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_in_a_download_goes_on_from_its_last_byte(
    server: HubServer, commit: str, tiny: Path, tmp_path: Path, local: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    path = shards(tiny)[3]
    half = path.stat().st_size // 2
    sha256 = server.commits[REPO][commit][path.name].sha256
    cut = Fault(f"/cdn/{sha256}", cut=half)
    child: list[subprocess.Popen[bytes]] = []

    def on_request(request: Request) -> None:
        """The first request for the whole shard gets half of it; at the second, the run is killed."""
        if f"/cdn/{sha256}" in request.path and request.range == f"bytes=0-{path.stat().st_size - 1}":
            server.faults.append(cut)
        if f"/cdn/{sha256}" in request.path and request.range == f"bytes={half}-{path.stat().st_size - 1}":
            child[0].kill()

    server.on_request = on_request
    settings = {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
    path_setting = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", KILLED, str(out)]
    child.append(subprocess.Popen(command, env=os.environ | settings | {"PYTHONPATH": path_setting}))
    assert child[0].wait(120) == -signal.SIGKILL

    staging = Staging.beside(out)
    assert (staging.source / f"{path.name}.part").read_bytes() == path.read_bytes()[:half]
    kept = len([*staging.receipts()])
    watch, before = Watch(server, out), len(server.requests)
    report = convert(out, keep_source=False)
    assert report.jobs_kept == kept > 0
    assert outputs(out) == local
    assert max(watch.counts) == 2
    ranges = [r.range for r in server.requests[before:] if f"/cdn/{sha256}" in r.path]
    assert f"bytes={half}-{path.stat().st_size - 1}" in ranges
    assert f"bytes=0-{path.stat().st_size - 1}" not in ranges


# --- the shelf by itself


class Store:
    """A repository whose files appear at once; takes the place of HubFiles on a shelf."""

    def __init__(self, folder: Path, cached: set[str]) -> None:
        self.folder, self.held, self.most, self.brought = folder, cached, 0, list[str]()
        self.repo_id = "org/name"
        self._lock = threading.Lock()

    def cached(self, name: str) -> Path | None:
        return self.folder.parent / name if name in self.held else None

    def absent(self, names: Any) -> dict[str, int]:
        return {name: 1 for name in names if name not in self.held}

    def count(self) -> int:
        return len([path for path in self.folder.iterdir() if not path.is_symlink()])

    def download(self, name: str, path: Path, watch: Any, pause: Any) -> None:
        part = path.with_name(path.name + ".part")
        part.touch()
        with self._lock:
            self.brought.append(name)
            self.most = max(self.most, self.count())
        watch(1)
        part.rename(path)


@st.composite
def work(draw: st.DrawFn) -> tuple[dict[int, set[str]], int, set[str], set[str]]:
    """Jobs and their shards in any order, places, what the cache holds and what an earlier run left."""
    names = [f"{n}.safetensors" for n in range(draw(st.integers(1, 8)))]
    needs = draw(st.lists(st.sets(st.sampled_from(names), min_size=1, max_size=4), min_size=1, max_size=20))
    cached = draw(st.sets(st.sampled_from(names), max_size=2))
    largest = max(len(shards - cached) for shards in needs)
    places = draw(st.integers(max(1, largest), max(1, largest) + 3))
    left = draw(st.sets(st.sampled_from([*names, *(f"{name}.part" for name in names)])))
    return dict(enumerate(needs, 1)), places, cached, left


@settings(deadline=None, max_examples=80)
@given(work(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_shelf_is_bounded_and_never_stuck(
    planned: tuple[dict[int, set[str]], int, set[str], set[str]], threads: int, chance: random.Random
) -> None:
    needs, places, cached, left = planned
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "source"
        folder.mkdir()
        for name in cached:
            (folder.parent / name).touch()
        for name in left:
            (folder / name).touch()
        store = Store(folder, cached)
        ran = []

        def run(job: int) -> int:
            time.sleep(chance.random() / 1000)  # jobs end in any order
            assert all((folder / shard).exists() for shard in needs[job])
            store.most = max(store.most, store.count())
            ran.append(job)
            return job

        with (
            ThreadPoolExecutor(threads) as pool,
            Shelf(store, folder, needs, places=places, keep=False, progress=False) as shelf,  # type: ignore[arg-type]
        ):
            futures = [shelf.submit(pool, job, run, job) for job in needs]
            _, stuck = wait(futures, timeout=20)
            assert not stuck
            assert [future.result() for future in futures] == [*needs]
        assert sorted(ran) == [*needs]
        assert store.most <= places
        assert store.count() == 0
        wanted = set().union(*needs.values()) - cached
        assert {*store.brought} <= wanted <= {*store.brought} | left
        if len(wanted) <= places:
            assert len(store.brought) == len({*store.brought})  # with room for all, none comes twice


def test_a_shelf_gives_up_what_is_needed_last(tmp_path: Path) -> None:
    store = Store(tmp_path / "source", set())
    needs = {1: ["a", "b"], 2: ["c", "d"], 3: ["a"], 4: ["b"]}
    with Shelf(store, tmp_path / "source", needs, places=3, keep=False, progress=False) as shelf:  # type: ignore[arg-type]
        futures = [shelf.submit(Inline(), job, int) for job in needs]
        assert [future.result(60) for future in futures] == [0, 0, 0, 0]
    assert sorted(store.brought) == ["a", "b", "b", "c", "d"]


def test_a_shelf_refuses_a_job_that_cannot_fit(tmp_path: Path) -> None:
    store = Store(tmp_path / "source", set())
    with pytest.raises(ValueError, match="prefetch is 1, but a job reads 2"):
        Shelf(store, tmp_path / "source", {1: ["a", "b"]}, places=1, keep=False)  # type: ignore[arg-type]


def test_a_failed_job_keeps_its_shards(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    store = Store(folder, set())

    def fail() -> None:
        raise MemoryError("no more")

    with (
        ThreadPoolExecutor(1) as pool,
        Shelf(store, folder, {1: ["a"], 2: ["b"]}, places=2, keep=False, progress=False) as shelf,  # type: ignore[arg-type]
    ):
        failed, fine = shelf.submit(pool, 1, fail), shelf.submit(pool, 2, int)
        assert fine.result(60) == 0
        assert isinstance(failed.exception(60), MemoryError)
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_leaving_a_shelf_ends_its_downloads(
    server: HubServer, commit: str, tiny: Path, tmp_path: Path
) -> None:
    """Neither a wait between attempts nor a download in the middle holds up the end of a run."""
    first, second = shards(tiny)[:2]
    arrived = threading.Event()
    sha256 = server.commits[REPO][commit][second.name].sha256

    def on_request(request: Request) -> None:
        if sha256 and sha256 in request.path:
            arrived.set()

    files = open_repository(REPO)
    server.on_request = on_request
    server.faults = [Fault(f"/cdn/{sha256}", status=429, headers={"Retry-After": "3600"}, times=99)]
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        needs = {1: [first.name], 2: [second.name]}
        with Shelf(files, tmp_path / "source", needs, places=2, keep=False, progress=False) as shelf:
            assert shelf.submit(pool, 1, int).result(60) == 0
            waiting = shelf.submit(pool, 2, int)
            assert arrived.wait(60)
        assert not waiting.done() or waiting.exception() is not None
    assert time.monotonic() - began < 60  # the server asked for an hour
