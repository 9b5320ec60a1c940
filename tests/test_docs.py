"""The README and the docs: their code runs, their commands parse, their links lead somewhere.

A ```python block after `<!-- run -->` is run, the blocks of a page one after another, in a folder where
moonshotai/Kimi-K3 is the tiny checkpoint and RedHatAI/Kimi-K3-FP8-BLOCK its conversion: a folder of
that name comes before the Hub. All other blocks are compiled.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import typer
from conftest import Inline
from markdown_it import MarkdownIt

import kimi_k3_fp8
from kimi_k3_fp8 import cli
from kimi_k3_fp8.errors import CODES
from kimi_k3_fp8.fidelity import Fidelity

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
COMMANDS = (["kimi-k3-fp8"], ["python", "-m", "kimi_k3_fp8"])


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


each_page = pytest.mark.parametrize("page", PAGES, ids=page_id)


class Block(NamedTuple):
    language: str
    code: str
    line: int
    run: bool


def blocks(page: Path) -> Iterator[Block]:
    run = False
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "fence":
            assert token.map is not None
            yield Block(token.info.strip(), token.content, token.map[0] + 2, run)
        run = token.type == "html_block" and token.content.strip() == "<!-- run -->"


# --- code


@each_page
def test_blocks_name_their_language(page: Path) -> None:
    known = {"python", "bash", "console", "text", "json", "yaml"}
    assert {block.language for block in blocks(page)} <= known


@each_page
def test_python_blocks_compile(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile("\n" * (block.line - 1) + block.code, str(page), "exec")


def test_run_marks_stand_before_python_blocks() -> None:
    for page in PAGES:
        marks = page.read_text(encoding="utf-8").count("<!-- run -->")
        assert marks == sum(block.run and block.language == "python" for block in blocks(page)), page


RUNNABLE = [page for page in PAGES if any(block.run for block in blocks(page))]


@pytest.mark.parametrize("page", RUNNABLE, ids=page_id)
def test_marked_blocks_run(
    page: Path, tiny: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, target in (("moonshotai/Kimi-K3", tiny), ("RedHatAI/Kimi-K3-FP8-BLOCK", converted)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    # Jobs in this process, for starting workers takes longer than the work; they have their own tests.
    inline = functools.partial(kimi_k3_fp8.quantize, executor=Inline(), progress=False)
    monkeypatch.setattr(kimi_k3_fp8, "quantize", inline)
    names: dict[str, object] = {}
    for block in blocks(page):
        if block.run:
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), names)


def test_there_are_blocks_to_run() -> None:
    assert len(RUNNABLE) > 5


# --- commands


def shell_lines(block: Block) -> Iterator[str]:
    """Lines as the shell sees them: joined at backslashes; of a console session only what is typed."""
    text = block.code.replace("\\\n", " ")
    for line in text.splitlines():
        if block.language == "bash":
            yield line
        elif block.language == "console" and line.startswith("$ "):
            yield line[2:]


def arguments(line: str) -> list[str] | None:
    """What follows this library's command in a line of shell, up to a pipe or the like; None for others."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = []
    for word in lexer:
        if set(word) <= set("|&;<>()"):
            break
        words.append(word)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    for command in COMMANDS:
        if words[: len(command)] == command:
            return words[len(command) :]
    return None


def parse(words: list[str]) -> None:
    """Parse without running. Raises a UsageError for what the command line does not know."""
    group = typer.main.get_command(cli.app)
    if words in (["--help"], ["--version"]):
        return
    command = group.commands[words[0]]  # type: ignore[attr-defined]
    if "--help" not in words:
        command.make_context(words[0], words[1:])


@each_page
def test_commands_parse(page: Path) -> None:
    for block in blocks(page):
        for line in shell_lines(block):
            words = arguments(line)
            if words is not None:
                try:
                    parse(words)
                except Exception as error:
                    raise AssertionError(f"{page}:{block.line}: {line}: {error!r}") from error


@pytest.mark.parametrize(
    "line",
    [
        "kimi-k3-fp8 plan x --no-such-option",
        "kimi-k3-fp8 quantize",
        "HF_HUB_OFFLINE=1 python -m kimi_k3_fp8 serve x --form podman | tee log",
        "kimi-k3-fp8 convert x",
    ],
)
def test_wrong_commands_do_not_parse(line: str) -> None:
    words = arguments(line)
    assert words is not None
    with pytest.raises(Exception):  # noqa: B017, PT011 (click's own, and a KeyError)
        parse(words)


@each_page
def test_shell_blocks_are_shell(page: Path) -> None:
    for block in blocks(page):
        script = "\n".join(shell_lines(block))
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert done.returncode == 0, f"{page}:{block.line}: {done.stderr}"


# --- links, pictures, files that are named


def links(page: Path) -> Iterator[str]:
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        for child in token.children or ():
            if target := child.attrGet("href") or child.attrGet("src"):
                yield str(target)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as Python-Markdown's toc and GitHub both make them."""
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    titles = [tokens[n + 1].content for n, token in enumerate(tokens) if token.type == "heading_open"]
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}"


@each_page
def test_named_files_exist(page: Path) -> None:
    """Files of the repository that are named as code."""
    for name in re.findall(r"`((?:examples|docs|benchmarks|tests)/[\w./-]*)`", page.read_text("utf-8")):
        assert (ROOT / name).exists(), f"{page}: {name}"


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


@each_page
def test_code_fits_the_page(page: Path) -> None:
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            assert max(map(len, token.content.splitlines()), default=0) <= 110 - 30 * (page.parent != ROOT)


@each_page
def test_pages_are_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 150


# --- nothing is missing, nothing is stale


def test_every_code_is_documented_with_its_meaning() -> None:
    entry = re.compile(r"^### `([\w-]+)`\n\n(.+)\n\n- Usually: .+(?:\n  .+)*\n- Do: .+", re.MULTILINE)
    found = {}
    for page in sorted((DOCS / "troubleshooting").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        entries = entry.findall(text)
        assert len(entries) == text.count("\n### "), f"{page}: an entry is not of the usual form"
        assert not found.keys() & dict(entries).keys(), "a code has two entries"
        found |= dict(entries)
    assert found.keys() == CODES.keys()
    for code, meaning in found.items():
        plain = meaning.replace("`", "").removesuffix(".")
        assert plain[0].lower() + plain[1:] in (CODES[code], CODES[code][0].lower() + CODES[code][1:]), code


def test_every_exception_is_in_the_troubleshooting() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    for name in kimi_k3_fp8.__all__:
        thing = getattr(kimi_k3_fp8, name)
        if isinstance(thing, type) and issubclass(thing, Exception) and not thing.__subclasses__():
            assert f"| `{name}` |" in text, name


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    listed = set(re.findall(r"^::: kimi_k3_fp8\.(\w+)$", text, re.MULTILINE))
    assert set(kimi_k3_fp8.__all__) <= listed
    assert not {name for name in listed if not hasattr(kimi_k3_fp8, name)}


def test_every_command_is_in_the_reference() -> None:
    text = (DOCS / "reference" / "command-line.md").read_text(encoding="utf-8")
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(commands)


def test_every_room_is_in_the_design() -> None:
    package = Path(kimi_k3_fp8.__file__).parent
    rooms = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
    text = (DOCS / "design.md").read_text(encoding="utf-8")
    listed = re.findall(r"^    (\w+)/?  +\S", text.partition("## Rooms")[2].partition("## Staging")[0], re.M)
    assert set(listed) == rooms | {"engine"}
    assert len(listed) == len(set(listed))


@functools.cache
def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_of_the_exactness_page_are_measured(tiny: Path, tmp_path: Path) -> None:
    plots = load("plots")
    errors = plots.measured(tiny, tmp_path, Inline())
    assert plots.table(errors) in (DOCS / "exactness.md").read_text(encoding="utf-8")
    picture = (DOCS / "images" / "fidelity.svg").read_text(encoding="utf-8")
    for (scales, when), records in errors.items():
        assert f"{scales}, {when}<" in picture
        for found in records:
            assert f">{found.module_class}<" in picture
            assert not found.differing or f">{100 * found.relative_rms_error:.1f}<" in picture


def test_the_picture_can_be_drawn(tiny: Path, tmp_path: Path) -> None:
    plots = load("plots")
    record = Fidelity(module_class="router", differing=1, squared_error=1e-4)
    record = record.model_copy(update={"squared_value": 1.0})
    keys = [(scales, when) for scales in ("amax", "power_of_two") for when in ("stored", "at load")]
    plots.draw(dict.fromkeys(keys, (record,)), tmp_path / "images" / "x.svg")
    assert ">1.0<" in (tmp_path / "images" / "x.svg").read_text()


def test_docstrings_become_lists() -> None:
    text = load("docstrings").as_markdown(
        "Does it.\n\nsource: from here,\n    or there.\nplace, size: x.\nRaises."
    )
    assert text.splitlines() == [
        "Does it.",
        "",
        "",
        "- **source**: from here,",
        "    or there.",
        "- **place, size**: x.",
        "",
        "Raises.",
    ]


@pytest.mark.slow
def test_the_site_builds_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    """A proxy that nobody answers stands for the network."""
    offline = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **offline, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    pages = [page.read_text(encoding="utf-8") for page in (tmp_path / "site").rglob("*.html")]
    assert len(pages) > len(PAGES) - 2
    fetched = re.compile(r"<(?:script|img|link)[^>]+(?:src|href)=\"?(https?:)?//", re.IGNORECASE)
    for page in pages:
        assert not fetched.search(page), "a reader's browser would fetch something"
