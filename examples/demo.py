"""An agent session that survives its server, checked from end to end.

    make demo

Makes a small model with random weights and serves it with the real SGLang on the CPU, on top of a
DualPath store in a temporary directory. An agent session runs half its turns; the server is killed
with SIGKILL, started again, and the session goes on from storage. Then one stored byte is flipped
and the last question asked again. At the end the whole session is repeated on a server without any
cache, whose answers must be the same. Ends with status 0 only if everything held.

The model is random, so its answers make no sense; that they are equal does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from dualpath_sglang.kvcache import KVCache
from dualpath_storage import NO_PARENT, StoreOptions
from dualpath_storage.header import HEADER_BYTES
from dualpath_storage.paths import segment_path
from examples.agent_session import Endpoint, Session, Turn, Workload, row, totals
from examples.agent_session import heading as session_heading
from examples.serving import CPU_ENVIRONMENT, CPU_FLAGS, Server, ServerError

PAGE_TOKENS = 64
TOOL_SECONDS = 0.5
WORKLOAD = Workload(system_chars=2400, tool_chars=320, answer_tokens=32)

# Its tokens are bytes. Large enough that computing a prompt costs more than serving it.
MODEL = {"hidden_size": 1024, "intermediate_size": 3072}

COMMON_FLAGS = (
    *CPU_FLAGS,
    *("--max-total-tokens", "16384", "--max-running-requests", "2"),
    *("--page-size", str(PAGE_TOKENS), "--random-seed", "0", "--skip-server-warmup"),
)
CACHED_FLAGS = (
    # With the first of these, storage lies below a host memory tier; without it, hits are streamed
    # into the forward, and there is no such tier.
    "--enable-hierarchical-cache",
    *("--hicache-storage-backend", "dualpath"),
    # Host memory for a little more than the device pool; SGLang's default is twice.
    *("--hicache-ratio", "1.5"),
    # Every page goes to host memory and storage as soon as it is computed (SGLang's default).
    *("--hicache-write-policy", "write_through"),
    # A request waits until all that is stored of its prompt has been read, so that the table does
    # not depend on the speed of the disk. The default, "timeout", waits a second or so.
    *("--hicache-storage-prefetch-policy", "wait_complete"),
)
UNCACHED_FLAGS = ("--disable-radix-cache",)


class DemoError(Exception):
    """Something did not hold; the message says what."""


@dataclass(frozen=True, slots=True)
class Page:
    """A stored page of the session: its key, and how many pages come before it."""

    key: str
    before: int


class Demo:
    """The steps, in order.

    Args:
        directory: for the model, the store and the logs.
        turns: of the session; the server is killed after half of them.
    """

    def __init__(self, directory: Path, turns: int) -> None:
        self.directory = directory
        self.turns = turns
        self.root = directory / "store"
        self.log = directory / "server.log"
        self.session = Session(WORKLOAD)
        self.after_damage: Turn | None = None
        self.reference: list[Turn] = []
        self._began = time.monotonic()

    def run(self) -> None:
        """Everything.

        Raises:
            DemoError, ServerError: something did not hold.
        """
        half = self.turns // 2
        self.say("making a small model with random weights")
        model = make_model(self.directory / "model")
        settings = json.dumps({"root": str(self.root), "capacity": "1GiB"})
        flags = (
            *(*COMMON_FLAGS, *CACHED_FLAGS),
            *("--hicache-storage-backend-extra-config", settings),
        )
        server = Server(model, flags, self.log, CPU_ENVIRONMENT)
        self.say(f"starting SGLang with --hicache-storage-backend dualpath, store {self.root}")
        with server:
            self.talk(server, half)
            self.await_stored(self.session.turns[-1].prompt_tokens // PAGE_TOKENS)
            self.say(f"SIGKILL to the server after turn {half}")
            server.kill()
            self.say("starting it again: its memory is gone, the store is not")
            server.start()
            self.talk(server, self.turns)
            self.check_restart(half)
            self.damage(server)
        self.say("starting SGLang without any cache, for the same session")
        with Server(model, (*COMMON_FLAGS, *UNCACHED_FLAGS), self.log, CPU_ENVIRONMENT) as plain:
            session = Session(WORKLOAD)
            endpoint = Endpoint(f"{plain.url}/v1")
            for _ in range(self.turns):
                self.note(session.step(endpoint))
            self.reference = session.turns
        self.check_answers()

    def talk(self, server: Server, until: int) -> None:
        """Let the session go on to turn ``until``."""
        endpoint = Endpoint(f"{server.url}/v1")
        while len(self.session.turns) < until:
            self.note(self.session.step(endpoint))
            time.sleep(TOOL_SECONDS)  # the tool runs, and the server writes to storage

    def await_stored(self, pages: int) -> None:
        """Wait until so many pages are in storage; writing goes on behind the answers."""
        for _ in range(50):
            if len(stored_keys(self.root)) >= pages:
                return
            time.sleep(0.2)
        raise DemoError(f"Fewer than {pages} pages were stored 10 s after the answer")

    def check_restart(self, half: int) -> None:
        """The first turn after the restart found what was stored before."""
        last, first = self.session.turns[half - 1], self.session.turns[half]
        stored = last.prompt_tokens // PAGE_TOKENS * PAGE_TOKENS
        if (first.storage_tokens or 0) < stored:
            raise DemoError(
                f"Turn {first.number}, the first after the restart, found {first.storage_tokens} "
                f"tokens in storage; at least the {stored} of the prompt before should be there"
            )

    def damage(self, server: Server) -> None:
        """Flip one stored byte: `dualpath verify` names it, a request misses it, and mends it."""
        self.verify(expected=None)
        page = flip_byte(self.root)
        self.say(f"flipped one byte of page {page.before + 1} of the prompt, {page.key[:16]}...")
        self.verify(expected=page.key)
        self.say("asking the last question again, with nothing left in memory")
        server.flush()
        turn = self.session.repeat(Endpoint(f"{server.url}/v1"))
        self.note(turn)
        self.after_damage = turn
        if turn.storage_tokens != page.before * PAGE_TOKENS:
            raise DemoError(
                f"The {page.before} pages before the damaged one should have been hits, "
                f"{page.before * PAGE_TOKENS} tokens; {turn.storage_tokens} were"
            )
        if turn.answer != self.session.turns[-1].answer:
            raise DemoError("The answer with a damaged page differs from the one before")
        for _ in range(50):  # the page was computed anew, and is being stored again
            if page.key in stored_keys(self.root):
                break
            time.sleep(0.2)
        else:
            raise DemoError(f"The damaged page {page.key} was not stored again")
        self.verify(expected=None)
        self.say("the page was computed anew and stored again")

    def verify(self, expected: str | None) -> None:
        """Run `dualpath verify`, which must name the damaged page, or none."""
        command = [sys.executable, "-m", "dualpath_sglang.cli", "verify", "--json"]
        done = subprocess.run(
            [*command, "--root", str(self.root)], capture_output=True, text=True, check=False
        )
        if done.returncode not in (0, 1):
            raise DemoError(f"dualpath verify could not do it: {done.stderr.strip()}")
        found = json.loads(done.stdout)
        named = [page["key"] for page in found["damaged"]]
        if named != ([] if expected is None else [expected]) or bool(named) != done.returncode:
            raise DemoError(
                f"dualpath verify named {named or 'nothing'} (status {done.returncode}) where "
                f"{expected or 'nothing'} is damaged"
            )
        for page in found["damaged"]:
            self.say(
                f"dualpath verify: {page['reason']} of layer {page['bad_layers'][0]} in segment "
                f"{page['segment']}, slot {page['slot']}, key {page['key'][:16]}..."
            )
        if expected is None:
            self.say(f"dualpath verify: {found['checked_blocks']} blocks, all good")

    def check_answers(self) -> None:
        """Turn by turn, the answers are those of the server without a cache."""
        for turn, plain in zip(self.session.turns, self.reference, strict=True):
            if turn.answer != plain.answer:
                raise DemoError(
                    f"Turn {turn.number} was answered {turn.answer!r} with the cache and "
                    f"{plain.answer!r} without"
                )

    # -- telling ----------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.monotonic() - self._began:5.1f} s] {text}", flush=True)

    def note(self, turn: Turn) -> None:
        """A line for a turn as it happens."""
        cached = f"{turn.cached_tokens} cached" if turn.cached_tokens else "nothing cached"
        self.say(
            f"  turn {turn.number}: {turn.prompt_tokens} prompt tokens, {cached}, "
            f"first token after {turn.ttft_s:.2f} s"
        )

    def report(self) -> None:
        """The table a turn, and the totals."""
        half = self.turns // 2
        print()
        print("Prompt tokens by the tier in which they were cached:")
        print(f"{session_heading()}   no cache: TTFT ms  same answer")
        for turn, plain in zip(self.session.turns, self.reference, strict=True):
            same = "yes" if turn.answer == plain.answer else "NO"
            print(f"{row(turn)} {1000 * plain.ttft_s:>19.0f}  {same:>11}")
            if turn.number == half:
                print(f"{'':>4}---- the server was killed and started again ----")
        if self.after_damage is not None:
            print(f"{'':>4}---- the last question again, one stored byte flipped ----")
            plain = self.reference[-1]
            same = "yes" if self.after_damage.answer == plain.answer else "NO"
            print(f"{row(self.after_damage)} {1000 * plain.ttft_s:>19.0f}  {same:>11}")
        with_cache, without = totals(self.session.turns), totals(self.reference)
        print()
        print(f"Totals of the {self.turns} turns:")
        print(f"{'':>24}{'with DualPath':>15}{'no cache':>12}")
        lines: tuple[tuple[str, str, float, float], ...] = (
            ("prompt tokens", ".0f", with_cache["prompt_tokens"], without["prompt_tokens"]),
            ("cached on the device", ".0f", with_cache["device_tokens"], without["device_tokens"]),
            ("cached in host memory", ".0f", with_cache["host_tokens"], without["host_tokens"]),
            ("cached in storage", ".0f", with_cache["storage_tokens"], without["storage_tokens"]),
            (
                *("computed", ".0f"),
                with_cache["prompt_tokens"] - with_cache["cached_tokens"],
                without["prompt_tokens"] - without["cached_tokens"],
            ),
            ("TTFT, s", ".2f", with_cache["ttft_s"], without["ttft_s"]),
            ("answers complete, s", ".2f", with_cache["elapsed_s"], without["elapsed_s"]),
        )
        for name, form, here, there in lines:
            print(f"{name:<24}{here:>15{form}}{there:>12{form}}")
        print()


def make_model(directory: Path) -> Path:
    """A small model with random weights, made by the model maker of this checkout's tests.

    Raises:
        DemoError: it could not be made.
    """
    code = (
        "import json, pathlib, sys; from tests.support.tiny_model import make_model; "
        "make_model(pathlib.Path(sys.argv[1]), 'qwen3', **json.loads(sys.argv[2]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory), json.dumps(MODEL)],
        cwd=Path(__file__).resolve().parents[1],
        env={**os.environ, **CPU_ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise DemoError(f"The model could not be made:\n{done.stderr}")
    return directory


def flip_byte(root: Path) -> Page:
    """Flip a bit in the middle of the payload of the page in the middle of the session."""
    with KVCache(StoreOptions(root, read_only=True)) as cache:
        (geometry,) = [g for g in cache.geometries() if g.pool == "kv"]
        entries = {entry.key: entry for entry in cache.index.entries(geometry)}
    children = {entry.parent: entry for entry in entries.values()}
    chain = []
    parent = NO_PARENT
    while parent in children:
        chain.append(children[parent])
        parent = chain[-1].key
    before = len(chain) // 2
    place = chain[before].placement
    offset = place.slot * geometry.slot_bytes + HEADER_BYTES + geometry.block_bytes // 2
    with segment_path(root / geometry.id, place.segment).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())
    return Page(chain[before].key.hex(), before)


def stored_keys(root: Path) -> set[str]:
    """Keys of the pages in the index."""
    with KVCache(StoreOptions(root, read_only=True)) as cache:
        return {entry.key.hex() for entry in cache.index.entries()}


@contextlib.contextmanager
def working_directory(keep: Path | None) -> Iterator[Path]:
    """A temporary directory, or the given one, which stays."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="dualpath-demo-") as name:
            yield Path(name)
    else:
        keep.mkdir(parents=True)
        yield keep.absolute()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(prog="demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=8, help="of the session (default 8)")
    parser.add_argument("--keep", type=Path, help="new directory to leave store and log in")
    options = parser.parse_args(arguments)
    if options.turns < 2:
        parser.error("a session that is interrupted has at least 2 turns")
    began = time.monotonic()

    def run() -> None:
        with working_directory(options.keep) as directory:
            demo = Demo(directory, options.turns)
            demo.run()
        demo.report()
        print(
            f"All held, in {time.monotonic() - began:.0f} s: hits from storage after the restart, "
            "a damaged page missed, named and mended, and every answer as without a cache."
        )

    return shown(run, keeps=options.keep is not None)


def shown(run: Callable[[], None], *, keeps: bool) -> int:
    """Run a demo so that it leaves nothing running, however it ends; its exit status.

    Args:
        keeps: whether what it leaves behind can be looked at.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupted)
    try:
        run()
    except (DemoError, ServerError, openai.OpenAIError, OSError) as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        if not keeps:
            print("With --keep DIR it leaves the store and the logs behind.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nThe demo was interrupted.", file=sys.stderr)
        return 130
    return 0


def _interrupted(number: int, frame: Any) -> None:
    del frame
    raise KeyboardInterrupt(signal.Signals(number).name)


if __name__ == "__main__":
    sys.exit(main())
