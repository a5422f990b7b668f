"""Streams of both engines as they were recorded (vLLM 0.32.0, SGLang 0.5.23), and with faults that real servers can't
be made to show; prompt sets in the forms that files have them."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers_export import make_run

from eyas.errors import DataError, EngineError, RecipeError
from eyas.evaluate.ask import Answer, Asker, settled, summed
from eyas.evaluate.load import Load, Pass, run_pass
from eyas.evaluate.prompts import PromptSets, load_sets
from eyas.run import Run
from eyas.settings import Serving
from eyas.target import load_target

END, VOCABULARY = 2, 259


class Server:
    """Streams events that a test gives, over chunks that end anywhere.

    Attributes:
        events: what is streamed, given a request's body.
        status: of answers.
        written: what /metrics says was written; None: what was streamed.
        cut: the connection ends in the middle of a stream.
        bodies: requests seen.
    """

    def __init__(self) -> None:
        self.status, self.cut, self.bodies, self.written = 200, False, list[dict[str, Any]](), 0
        self.drafts, self.accepted, self.extra = 0, [0, 0, 0], 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    self.give(json.dumps({"data": [{"id": "served"}]}).encode())
                    return
                positions = "".join(
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{at}"}} {count}.0\n'
                    for at, count in enumerate(outer.accepted)
                )
                self.give(
                    f'# HELP vllm:generation_tokens_total x\nvllm:generation_tokens_total{{engine="0"}} '
                    f'{outer.written + outer.extra}.0\nvllm:spec_decode_num_drafts_total{{engine="0"}} '
                    f"{outer.drafts}.0\n{positions}".encode()
                )

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                if outer.status != 200:
                    self.send_response(outer.status)
                    self.end_headers()
                    self.wfile.write(b'{"error": "the prompt is too long"}')
                    return
                raw = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in outer.stream(body))
                raw += b"data: [DONE]\n\n"
                self.send_response(200)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                for at in range(0, len(raw), 37):
                    if outer.cut and at > len(raw) // 2:
                        return
                    self.wfile.write(raw[at : at + 37])

            def give(self, raw: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def stream(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Five tokens: one of the prefill, then two verifications that accept 2 and 0 drafts."""
        pieces = [[50], [51, 52, 53], [END]]
        self.written += 5
        self.drafts += 2
        self.accepted = [self.accepted[0] + 1, self.accepted[1] + 1, self.accepted[2]]
        if "input_ids" in body:
            whole: list[int] = []
            events = []
            for place, piece in enumerate(pieces):
                whole = whole + piece
                ended = {"type": "stop", "matched": END} if place == 2 else None
                meta = {"finish_reason": ended, "completion_tokens": len(whole), "spec_verify_ct": place}
                if place:
                    meta["spec_correct_drafts_histogram"] = [[0, 0, 1], [1, 0, 1]][place - 1]
                events.append({"output_ids": whole, "meta_info": meta})
            return events
        events = [
            {"choices": [{"index": 0, "text": "x", "finish_reason": None, "token_ids": piece}]} for piece in pieces
        ]
        events[0]["choices"][0]["prompt_token_ids"] = body["prompt"]
        events[-1]["choices"][0] |= {"finish_reason": "stop", "stop_reason": None}
        return events


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def ask(server: Server, kind: str, prompt: list[int], count: int = 1) -> list[Answer]:
    async def go() -> list[Answer]:
        async with Asker(server.url, kind, Serving(), frozenset([END]), VOCABULARY) as asker:
            return list(await asyncio.gather(*(asker.ask(prompt, 16, 7, "salt") for _ in range(count))))

    return asyncio.run(go())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_stream_gives_the_tokens_their_times_and_the_counts(server: Server, kind: str) -> None:
    (answer,) = ask(server, kind, [1, 10, 11])
    assert answer.token_ids == [50, 51, 52, 53, END] and not answer.cut
    assert 0 < answer.first_s <= answer.wall_s
    assert answer.accepted == ((1, 0, 1) if kind == "sglang" else None)
    body = server.bodies[0]
    assert body["stream"] and (body.get("extra_key") or body.get("cache_salt")) == "salt"
    sampling = body.get("sampling_params", body)
    assert sampling["temperature"] == 0 and sampling["stop_token_ids"] == [END]


def test_sglang_counts_for_each_request_and_vllm_for_all(server: Server) -> None:
    answers = ask(server, "sglang", [1, 10], 3)
    total = summed(answers, 3)
    assert total.verifications == 6 and total.accepted_at.tolist() == [3, 3, 0] and total.length == 2.0
    with pytest.raises(EngineError, match="no counts of drafts"):
        summed([Answer([1], True, 0.1, 0.2, None)], 3)


def passed(server: Server, kind: str, sets: PromptSets, drafts: int = 3) -> Pass:
    async def go() -> Pass:
        async with Asker(server.url, kind, Serving(), frozenset([END]), VOCABULARY) as asker:
            return await run_pass(asker, sets, "questions", Load(2, 99, 16, drafts, "salt"))

    return asyncio.run(go())


@pytest.fixture
def sets(tmp_path: Path, tiny_target: Path) -> PromptSets:
    (tmp_path / "questions.jsonl").write_text(
        '{"id": "a", "prompt": "hello"}\n{"id": "b", "turns": ["one", "two"]}\n'
        '{"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]}\n'
    )
    run = make_run(tmp_path, tiny_target, '[serving]\nkind = "vllm"\nprompts = ["questions.jsonl"]')
    return load_sets(run, load_target(run.recipe.target))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_pass_asks_every_turn_and_counts_only_its_own(server: Server, kind: str, sets: PromptSets) -> None:
    ask(server, kind, [1, 10], 4)
    done = passed(server, kind, sets)
    assert {name: len(answers) for name, answers in done.answers.items()} == {"a": 1, "b": 2, "2": 1}
    assert done.tokens == 20 and done.acceptance is not None
    assert done.acceptance.verifications == 8 and done.acceptance.accepted_at.tolist() == [4, 4, 0]
    figures = done.figures()
    assert figures["tokens_per_s"] == pytest.approx(20 / done.wall_s, rel=0.01) and figures["answers"] == 4
    second = sets.maker.encoder.decode(done.prompts["b"][1])
    assert "one" in second and second.index("<|im_end|>\n<|im_start|>user\ntwo") > second.index("assistant\n")
    assert "be brief" in sets.maker.encoder.decode(done.prompts["2"][0])
    assert passed(server, kind, sets).digests() == done.digests()


def test_a_lost_request_ends_the_measurement(server: Server, sets: PromptSets) -> None:
    server.cut = True
    with pytest.raises(EngineError, match="an answer|RemoteProtocolError|peer closed"):
        passed(server, "vllm", sets)
    server.cut, server.status = False, 500
    with pytest.raises(EngineError, match="HTTP 500"):
        passed(server, "vllm", sets)


def test_prompts_that_are_refused_are_counted_and_too_many_are_an_error(server: Server, sets: PromptSets) -> None:
    server.status = 400
    with pytest.raises(EngineError, match="3 of 3 prompts of questions were refused: HTTP 400"):
        passed(server, "sglang", sets)


def test_somebody_else_at_the_server_is_seen(server: Server) -> None:
    async def go() -> None:
        async with Asker(server.url, "vllm", Serving(), frozenset([END]), VOCABULARY) as asker:
            before = await asker.counters()
            await asker.ask([1, 10], 16, 7, "salt")
            server.extra = 12
            await settled(asker, before.written + 5)

    with pytest.raises(EngineError, match="17 tokens were written, 5 came here"):
        asyncio.run(go())


def test_prompt_files_that_hold_nothing_are_told(tmp_path: Path, tiny_target: Path) -> None:
    def sets_of(text: str, names: str = '["p.jsonl"]') -> None:
        (tmp_path / "p.jsonl").write_text(text)
        run: Run = make_run(tmp_path, tiny_target, f'[serving]\nkind = "vllm"\nprompts = {names}')
        load_sets(run, load_target(run.recipe.target))

    with pytest.raises(DataError, match="no prompt in it can be asked: special_token_in_text"):
        sets_of('{"prompt": "<|im_start|>user"}\n')
    with pytest.raises(RecipeError, match="two files are named p"):
        sets_of('{"prompt": "hello"}\n', '["p.jsonl", "p.jsonl"]')
