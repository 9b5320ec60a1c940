"""Hub: a checkpoint in a repository of the Hugging Face Hub, and its shards on a bounded disk.

`HubFiles` reads a repository that is pinned to one commit: whole small files through huggingface_hub's
cache, and of the shards the headers alone, by range requests. Token, HF_ENDPOINT, HF_HUB_OFFLINE and
HF_HOME are huggingface_hub's affair and are honoured as it honours them. What its cache already holds
is used where it lies.

`Shelf` keeps the shards that running jobs need in a folder of the staging area, and no more of them
than it has places for:

    Kimi-K3-FP8-BLOCK.partial/source/
    ├── model-00001-of-000096.safetensors         downloaded; gone when no unfinished job needs it
    ├── model-00002-of-000096.safetensors.part    on its way; a later run goes on from its last byte
    └── model-00003-of-000096.safetensors ->      a link into huggingface_hub's cache, if it is there
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import httpx
from huggingface_hub import (
    HfApi,
    constants,
    get_cached_repo_tree,
    get_session,
    hf_hub_download,
    hf_hub_url,
    hf_raise_for_status,
    is_offline_mode,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported lazily, and documented
    are_progress_bars_disabled,
    build_hf_headers,
    parse_ratelimit_headers,
)
from tqdm.auto import tqdm

from kimi_k3_fp8.checkpoint import CONFIG_NAME, Folder
from kimi_k3_fp8.errors import EngineError, SourceError

_T = TypeVar("_T")
_Watch = Callable[[int], None]
_Pause = Callable[[float], None]

#: Seconds to wait before each new attempt, unless the server asks for more. A download that moves
#: begins counting anew.
WAITS = (1, 2, 4, 8, 16)
#: Files read at once while headers are read: each is little more than waiting for an answer.
PARALLEL = 8

_logger = logging.getLogger(__name__)


class HubFile(NamedTuple):
    """One file of a commit: bytes, git's id of its content, and the sha256 of a large file."""

    size: int
    blob: str
    sha256: str | None


def open_repository(repo_id: str, revision: str | None = None) -> HubFiles:
    """The files of a Hub repository, pinned to the commit that `revision` names now.

    Fetches the list of files and config.json. Offline (HF_HUB_OFFLINE=1) the repository must be whole
    in huggingface_hub's cache. Raises SourceError where there is no such repository or revision, where
    the token does not open it, or where the Hub cannot be reached.
    """
    offline = is_offline_mode()

    def look() -> HubFiles:
        # snapshot_download also notes the commit and its list of files in the cache, by which a later
        # call knows offline whether the snapshot is whole.
        snapshot = snapshot_download(
            repo_id,
            revision=revision,
            local_files_only=offline,
            allow_patterns=None if offline else [CONFIG_NAME],
            tqdm_class=_quiet(_ignore),
        )
        commit = Path(snapshot).name
        listing = _cached_files(repo_id, snapshot) if offline else _files(repo_id, commit)
        return HubFiles(repo_id, commit, listing)

    try:
        return _patiently(look, time.sleep)
    except Exception as error:
        where = f"{repo_id} at revision {revision}" if revision else repo_id
        raise SourceError(f"{where}: {'; '.join(_explain(error, repo_id))}") from error


def _files(repo_id: str, commit: str) -> dict[str, HubFile]:
    info = HfApi().model_info(repo_id, revision=commit, files_metadata=True)
    return {
        file.rfilename: HubFile(file.size or 0, file.blob_id or "", file.lfs.sha256 if file.lfs else None)
        for file in sorted(info.siblings or (), key=lambda file: file.rfilename)
    }


def _cached_files(repo_id: str, snapshot: str) -> dict[str, HubFile]:
    try:
        listed = get_cached_repo_tree(repo_id, revision=Path(snapshot).name)
    except CachedRepoTreeNotFoundError:  # cached file by file: what is there is all there is
        sizes = Folder(Path(snapshot)).sizes()
        return {name: HubFile(size, f"of {Path(snapshot).name}", None) for name, size in sizes.items()}
    return {
        file.path: HubFile(file.size, file.blob_id, None)
        for file in sorted(listed, key=lambda file: file.path)
    }


@dataclass(frozen=True)
class HubFiles:
    """Files of a Hub repository at one commit. `files` is what the commit holds, by name."""

    repo_id: str
    commit: str
    files: Mapping[str, HubFile]

    @property
    def source(self) -> str:
        return f"{self.repo_id}@{self.commit}"

    def sizes(self) -> dict[str, int]:
        return {name: file.size for name, file in self.files.items()}

    def map(self, read: Callable[[str], _T], names: Sequence[str]) -> Iterator[_T]:
        """`read` of each name, in order, several at once and with a progress bar."""
        with (
            ThreadPoolExecutor(PARALLEL, thread_name_prefix="read") as pool,
            tqdm(
                pool.map(read, names),
                desc=f"reading {self.repo_id}",
                total=len(names),
                disable=are_progress_bars_disabled(),
            ) as values,
        ):
            yield from values

    def identity(self, name: str) -> str:
        """Git's id of the content: a commit that leaves this file alone does not change it."""
        file = self.files[name]
        return f"{file.size} bytes, git blob {file.blob}"

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of one file: a whole one through the cache, a part by requesting exactly that part.

        Raises SourceError where the Hub does not deliver.
        """
        try:
            if start == 0 and length is None:
                return self._fetch(name, _ignore, time.sleep).read_bytes()
            if (cached := self.cached(name)) is not None:
                return Folder(cached.parent).read(cached.name, start, length)
            size = self.files[name].size
            stop = size if length is None else min(size, start + length)
            return b"".join(self._stream(name, start, stop, time.sleep))
        except Exception as error:
            reason = "; ".join(_explain(error, self.repo_id))
            raise SourceError(f"{self.source}: {name}: {reason}") from error

    def cached(self, name: str) -> Path | None:
        """The whole file in huggingface_hub's cache, or None."""
        found = try_to_load_from_cache(self.repo_id, name, revision=self.commit)
        if not isinstance(found, str) or os.path.getsize(found) != self.files[name].size:
            return None
        return Path(found)

    def absent(self, names: Iterable[str]) -> dict[str, int]:
        """Those of the named files that would have to be downloaded, and their bytes."""
        return {name: self.files[name].size for name in names if self.cached(name) is None}

    def fetch(self, name: str, watch: _Watch | None = None, pause: _Pause = time.sleep) -> Path:
        """The file in huggingface_hub's cache, downloaded if need be, its size and sha256 verified.

        watch: called with the number of bytes of every piece that arrives; what it raises ends the
        download. pause: how to wait for a number of seconds. Raises EngineError.
        """
        try:
            return self._fetch(name, watch or _ignore, pause)
        except Exception as error:
            raise self._engine_error(name, error) from error

    def download(
        self, name: str, path: Path, watch: _Watch | None = None, pause: _Pause = time.sleep
    ) -> None:
        """Download a file to `path`, outside the cache, its size and sha256 verified.

        Bytes arrive in `path` + ".part", which an interrupted download leaves for the next one to go on
        from. watch, pause: as for `fetch`. Raises EngineError.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            try:
                self._download(name, path, watch or _ignore, pause)
            except _AlteredError:  # what an earlier attempt left may be why: once more, all of it
                self._download(name, path, watch or _ignore, pause)
        except Exception as error:
            raise self._engine_error(name, error) from error

    def _fetch(self, name: str, watch: _Watch, pause: _Pause) -> Path:
        if (cached := self.cached(name)) is not None:
            return cached
        file = self.files[name]

        def fetch() -> Path:
            path = Path(hf_hub_download(self.repo_id, name, revision=self.commit, tqdm_class=_quiet(watch)))
            sound = path.stat().st_size == file.size
            if sound and file.sha256:
                with open(path, "rb") as content:
                    sound = _sha256(content) == file.sha256
            if not sound:
                path.resolve().unlink()  # the blob, else the cache would go on offering it
                raise _AlteredError("what arrived is not what the commit lists (size or sha256)")
            return path

        return _patiently(fetch, pause)

    def _download(self, name: str, path: Path, watch: _Watch, pause: _Pause) -> None:
        file, part = self.files[name], path.with_name(path.name + ".part")
        with open(part, "a+b") as content:
            content.seek(0)
            digest = hashlib.sha256()
            while piece := content.read(1 << 24):
                digest.update(piece)
            watch(content.tell())
            for piece in self._stream(name, content.tell(), file.size, pause):
                content.write(piece)
                digest.update(piece)
                watch(len(piece))
            content.flush()
            os.fsync(content.fileno())
            sound = content.tell() == file.size and file.sha256 in (None, digest.hexdigest())
        if not sound:
            part.unlink()
            raise _AlteredError("what arrived is not what the commit lists (size or sha256)")
        os.replace(part, path)

    def _stream(self, name: str, start: int, stop: int, pause: _Pause) -> Iterator[bytes]:
        """The bytes from start to stop, over as many connections as it takes."""
        waits = iter(WAITS)
        while start < stop:
            try:
                for piece in self._connection(name, start, stop):
                    start += len(piece)
                    waits = iter(WAITS)
                    yield piece
                if start < stop:
                    raise httpx.RemoteProtocolError("the connection ended early")
            except Exception as error:  # noqa: PERF203 (the loop is there to try again)
                _wait(error, waits, pause)

    def _connection(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        url = hf_hub_url(self.repo_id, name, revision=self.commit)
        headers = build_hf_headers(library_name="kimi_k3_fp8")
        headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
            if response.is_error:
                response.read()
            hf_raise_for_status(response)
            # A server that knows no ranges answers 200 and begins at the beginning.
            position = start if response.status_code == 206 else 0
            for piece in response.iter_bytes():
                wanted = piece[max(0, start - position) : max(0, stop - position)]
                position += len(piece)
                if wanted:
                    yield wanted
                if position >= stop:
                    return

    def _engine_error(self, name: str, error: Exception) -> Exception:
        if isinstance(error, _StoppedError):
            return error
        message, fix = _explain(error, self.repo_id)
        return EngineError(name, f"{self.source}: {message}", f"{fix}; finished jobs are kept")


class Shelf:
    """The source shards that jobs need, in a local folder while they need them.

    A job's shards take their places all at once and in the order of the jobs, so jobs never wait for
    each other in a circle; a shard nobody uses gives its place up for one that is needed sooner. With
    P places there are never more than P downloaded shards on disk, finished or not. Shards that the
    cache held beforehand are links and take no place.

    needs: for each job that will be submitted, in order, the shards it reads. keep: download into
    huggingface_hub's cache and leave the shards there; a place then only limits how far downloads run
    ahead. Raises ValueError for fewer places than one job needs shards.

    A context manager: leaving it ends every download, and what is on disk stays for the next run.
    """

    def __init__(
        self,
        repository: HubFiles,
        folder: Path,
        needs: Mapping[int, Iterable[str]],
        *,
        places: int,
        keep: bool,
        progress: bool = True,
    ) -> None:
        self._repository, self._keep, self._places = repository, keep, places
        self.files = Folder(folder)
        wanted = {job: tuple(sorted(set(shards))) for job, shards in needs.items()}
        linked = {
            shard: cached
            for shard in dict.fromkeys(shard for shards in wanted.values() for shard in shards)
            if (cached := repository.cached(shard)) is not None
        }
        #: Of each unfinished job, the shards that take a place.
        self._needs = {job: {*shards} - {*linked} for job, shards in wanted.items()}
        largest = max(map(len, self._needs.values()), default=0)
        if places < largest:
            raise ValueError(f"prefetch is {places}, but a job reads {largest} shards at once")
        self._uses = Counter(shard for shards in self._needs.values() for shard in shards)
        self._queue = deque(self._needs)
        self._seated: set[int] = set()  # jobs whose shards have their places
        self._here: dict[str, Future[None]] = {}  # shards that take a place; done when it is there
        self._ready: dict[int, Future[None]] = {job: Future() for job in self._needs}
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._downloads = ThreadPoolExecutor(max(1, places), thread_name_prefix="download")
        self._submissions = ThreadPoolExecutor(1, thread_name_prefix="submit")
        self._tidy(linked)
        self._bar = tqdm(
            desc=f"downloading {repository.repo_id}",
            total=sum(repository.absent(self._uses.keys() - self._here.keys()).values()),
            unit="B",
            unit_scale=True,
            disable=not progress or not self._uses,
        )

    def __enter__(self) -> Shelf:
        with self._lock:
            self._seat()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._submissions.shutdown(cancel_futures=True)
        self._downloads.shutdown(cancel_futures=True)
        self._bar.close()

    def submit(self, executor: Executor, job: int, call: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """What `executor.submit(call, *arguments)` gives, submitted once the job's shards are there.

        When the call has returned, the job is finished and its shards are free. A call that raises keeps
        them. A download that fails is the future's exception.
        """
        outcome: Future[_T] = Future()

        def finish(work: Future[_T]) -> None:
            try:
                result = work.result()
                self._release(job)
            except BaseException as error:  # whoever waits for the outcome must see it
                outcome.set_exception(error)
            else:
                outcome.set_result(result)

        def start() -> None:
            if not outcome.set_running_or_notify_cancel():
                return
            try:
                self._ready[job].result()
                work = executor.submit(call, *arguments)
            except BaseException as error:
                outcome.set_exception(error)
            else:
                work.add_done_callback(finish)

        def arrived(_: Future[None]) -> None:
            with suppress(RuntimeError):  # the shelf is closed, and nobody waits any more
                self._submissions.submit(start)

        self._ready[job].add_done_callback(arrived)
        return outcome

    def _tidy(self, linked: Mapping[str, Path]) -> None:
        """Keep what an earlier run left for the first places, and link what the cache holds."""
        root = self.files.path
        root.mkdir(parents=True, exist_ok=True)
        # Only shards that are seated before all others may stay: then even one that is half there
        # never takes a place beyond the limit.
        in_order = dict.fromkeys(shard for job in self._queue for shard in sorted(self._needs[job]))
        first = set([*in_order][: self._places])
        for path in sorted(path for path in root.rglob("*") if path.is_symlink() or path.is_file()):
            name = path.relative_to(root).as_posix()
            partly = name.removesuffix(".part")
            if name in first and not path.is_symlink():
                self._here[name] = Future()
                self._here[name].set_result(None)
            elif self._keep or partly == name or partly not in first or partly in self._here:
                path.unlink()
        for shard, cached in linked.items():
            _link(root / shard, cached)

    def _seat(self) -> None:
        """Give jobs their places, in order, as long as there are any. The lock is held."""
        while self._queue and not self._stop.is_set():
            used = {shard for job in self._seated for shard in self._needs[job]}
            wanted = self._needs[self._queue[0]]
            if len(used | wanted) > self._places:
                return
            job = self._queue.popleft()
            self._make_room(used | wanted)
            self._seated.add(job)
            for shard in sorted(wanted - self._here.keys()):
                self._here[shard] = self._downloads.submit(self._bring, shard)
            _when_all([self._here[shard] for shard in wanted], self._ready[job])

    def _make_room(self, used: set[str]) -> None:
        excess = len(used | self._here.keys()) - self._places
        if excess > 0:
            later = reversed([*enumerate(self._queue)])
            next_use = {shard: n for n, job in later for shard in self._needs[job]}
            idle = sorted(self._here.keys() - used, key=lambda shard: (next_use[shard], shard))
            for shard in idle[-excess:]:
                self._drop(shard)

    def _release(self, job: int) -> None:
        with self._lock:
            self._seated.discard(job)
            for shard in self._needs.pop(job):
                self._uses[shard] -= 1
                if not self._uses[shard]:
                    self._drop(shard)
            self._seat()

    def _drop(self, shard: str) -> None:
        del self._here[shard]
        (self.files.path / shard).unlink()

    def _bring(self, shard: str) -> None:
        path = self.files.path / shard
        if self._keep:
            _link(path, self._repository.fetch(shard, self._watch, self._pause))
        else:
            self._repository.download(shard, path, self._watch, self._pause)

    def _watch(self, count: int) -> None:
        if self._stop.is_set():
            raise _StoppedError("the run has ended")
        with self._lock:
            self._bar.update(count)

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _StoppedError("the run has ended")


def _when_all(parts: Iterable[Future[None]], whole: Future[None]) -> None:
    """Complete `whole` when all parts are, or with the first failure among them."""
    waiting, lock = [*parts], threading.Lock()

    def look(part: Future[None]) -> None:
        with lock:
            waiting.remove(part)
            if whole.done():
                return
            error = _StoppedError("the run has ended") if part.cancelled() else part.exception()
            if error is not None:
                whole.set_exception(error)
            elif not waiting:
                whole.set_result(None)

    if not waiting:
        whole.set_result(None)
    for part in [*waiting]:
        part.add_done_callback(look)


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target.absolute())


# --- patience, and plain words when it ends


class _AlteredError(Exception):
    """Bytes that are not the commit's."""


class _StoppedError(Exception):
    """The run ended while a download was under way."""


def _patiently(call: Callable[[], _T], pause: _Pause) -> _T:
    """Call until it succeeds, as long as another attempt may help."""
    waits = iter(WAITS)
    while True:
        try:
            return call()
        except Exception as error:  # noqa: PERF203 (the loop is there to try again)
            _wait(error, waits, pause)


def _wait(error: Exception, waits: Iterator[int], pause: _Pause) -> None:
    """Wait before the next attempt; raise the error if there shall be none."""
    cause = _cause(error)
    seconds = next(waits, None)
    if seconds is None or not _may_pass(cause):
        raise error
    seconds = max(seconds, _asked_for(cause))
    reason = next(iter(str(cause).strip().splitlines()), repr(cause))
    _logger.warning("%s; trying again in %d s", reason, seconds)
    pause(seconds)


def _cause(error: Exception) -> BaseException:
    """huggingface_hub says that a file is not in the cache when the network was what failed."""
    is_consequence = isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None
    return error.__cause__ or error if is_consequence else error


def _may_pass(cause: BaseException) -> bool:
    if isinstance(cause, HfHubHTTPError):
        return cause.response.status_code in (408, 429) or cause.response.is_server_error
    # hf_hub_download reports a body that ended early as an OSError without a number.
    short = type(cause) is OSError and cause.errno is None
    return short or isinstance(cause, (httpx.TransportError, _AlteredError))


def _asked_for(cause: BaseException) -> int:
    """Seconds the server asks to wait (Retry-After, or the Hub's own rate limit), else 0."""
    if not isinstance(cause, HfHubHTTPError):
        return 0
    headers = cause.response.headers
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds
    text = headers.get("Retry-After", "")
    return int(text) if text.isdigit() else 0


def _explain(error: Exception, repo_id: str) -> tuple[str, str]:
    """What went wrong, and what to do about it."""
    cause = _cause(error)
    endpoint = constants.ENDPOINT
    if isinstance(cause, GatedRepoError):
        return (
            "access to it is granted only on request, and this token has none",
            f"accept its terms at {endpoint}/{repo_id}, then run `hf auth login` or set HF_TOKEN",
        )
    if isinstance(cause, RepositoryNotFoundError):
        return (
            f"{endpoint} has no such repository, or does not show it to this token; "
            "and there is no such local folder",
            "check the name; for a private repository run `hf auth login` or set HF_TOKEN",
        )
    if isinstance(cause, RevisionNotFoundError):
        return (
            f"{endpoint} does not have this revision, or does not have it any more",
            "name a revision that exists; a run goes on only from the commit it was begun with",
        )
    if isinstance(cause, IncompleteSnapshotError):
        return f"its snapshot in the cache is not whole ({cause})", "go online once to complete it"
    if is_offline_mode() or isinstance(cause, OfflineModeIsEnabled):
        return (
            f"it is not in the cache at {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to look further",
            "unset HF_HUB_OFFLINE, or download the whole repository beforehand",
        )
    again = f"gave up after {len(WAITS) + 1} attempts; check the connection and HF_ENDPOINT, then call again"
    if isinstance(cause, HfHubHTTPError):
        answer = f"{cause.response.url.host} answers {cause.response.status_code}"
        denied = "check the token (`hf auth login` or HF_TOKEN) and what it may read"
        return f"{answer} {cause.response.reason_phrase}", again if _may_pass(cause) else denied
    if isinstance(cause, (httpx.HTTPError, _AlteredError)):
        return f"{endpoint} does not deliver ({type(cause).__name__}: {cause})", again
    if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
        return "the disk is full", "free space or lower prefetch, then call again"
    return f"{type(cause).__name__}: {cause}", "call again"


def _sha256(content: Any) -> str:
    digest = hashlib.sha256()
    while piece := content.read(1 << 24):
        digest.update(piece)
    return digest.hexdigest()


def _ignore(count: int) -> None:
    pass


def _quiet(watch: _Watch) -> type[tqdm]:  # type: ignore[type-arg]
    """A progress bar that shows nothing and passes on what huggingface_hub tells it."""

    class Quiet(tqdm):  # type: ignore[type-arg]  # generic for type checkers only
        def __init__(self, *arguments: Any, **options: Any) -> None:
            options["disable"] = True
            super().__init__(*arguments, **options)

        def update(self, n: float | None = 1) -> bool | None:
            watch(int(n or 0))
            return None

        def update_transfer(self, n: float | None = 1) -> None:
            """What has come over the network; `update` counts what is on disk."""

        def set_transfer_postfix_str(self, s: str = "", refresh: bool = True) -> None:
            """Nothing is shown."""

    return Quiet
