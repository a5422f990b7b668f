"""A stand-in for a tapped SGLang, for faults that a real one can't be made to show: HTTP in a thread, the target run by
Transformers, rows through a real ring. The real one is tested in tests/engines/."""

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from eyas.tap.block import Layout, Segment
from eyas.tap.encode import encode
from eyas.tap.ring import Ring
from eyas.tap.writer import RingWriter


class FakeSGLang:
    """Answers /server_info, /generate and /abort_request, and writes rows as the tap does.

    Attributes, all to be set at any time:
        shift: added to every layer id.
        drop: ids of requests (their end) -> how many more of their attempts lose all rows.
        statuses: HTTP statuses that the next requests get, before all else.
        disturb: called with (rid, token ids, aux, final) before they are sent; returns what is sent instead.
        info: what /server_info says.
        seen: number of requests by rid.
    """

    def __init__(self, target: Path, ring: Path, aux_layer_ids: list[int], chunk: int = 64) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.ids, self.chunk, self.ring = aux_layer_ids, chunk, RingWriter.attach(str(ring))
        self.ring.open()
        self.shift = 0
        self.drop: Counter[int] = Counter()
        self.statuses: list[int] = []
        self.disturb = lambda rid, ids, aux, final: (ids, aux, final)
        self.info: dict[str, Any] = {"version": "0.5.23", "max_req_input_len": 400, "chunked_prefill_size": chunk}
        self.info |= {"dtype": "float32", "load_format": "auto", "disable_radix_cache": True}
        self.seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        ids, rid = body["input_ids"], body["rid"]
        with self._lock:
            self.seen[rid] += 1
            if self.statuses:
                return self.statuses.pop(0), {"error": "as the test wants it"}
            if len(ids) >= self.info["max_req_input_len"]:
                return 400, {"error": "too long"}
            logits = self._run(rid, torch.tensor(ids))
        meta: dict[str, Any] = {"id": rid, "finish_reason": {"type": "length"}, "prompt_tokens": len(ids)}
        if body.get("return_logprob"):
            start = body["logprob_start_len"]
            values = logits.log_softmax(-1)[start:-1].gather(1, torch.tensor(ids[start + 1 :])[:, None])[:, 0]
            meta["input_token_logprobs"] = [[None, ids[start], None]] + [
                [value, token, None] for value, token in zip(values.tolist(), ids[start + 1 :], strict=True)
            ]
        return 200, {"output_ids": [int(logits[-1].argmax())], "meta_info": meta}

    @torch.inference_mode()
    def _run(self, rid: str, ids: torch.Tensor) -> torch.Tensor:
        out = self.model(ids[None], output_hidden_states=True)
        aux = torch.stack([out.hidden_states[i + self.shift][0] for i in self.ids], 1)
        sent, aux, final = self.disturb(rid, ids, aux, out.hidden_states[-1][0])
        for first in range(0, len(sent), self.chunk):
            rows = slice(first, first + self.chunk)
            if self.drop[len(ids)]:
                continue
            self._send(Segment(rid, first, len(sent[rows])), sent[rows], aux[rows], final[rows])
        self.drop[len(ids)] = max(0, self.drop[len(ids)] - 1)
        return out.logits[0]

    def _send(self, segment: Segment, ids: torch.Tensor, aux: torch.Tensor, final: torch.Tensor) -> None:
        slot = self.ring.reserve(segment.length, [segment], 5.0)
        if slot is None:
            return
        slot.token_ids.copy_(ids)
        for place, states, encoding in (
            (slot.aux, aux, self.ring.layout.encoding),
            (slot.final, final, self.ring.layout.final_encoding),
        ):
            for to, value in zip(place, encode(states, encoding, 1), strict=True):
                if to is not None:
                    to.copy_(value)
        self.ring.publish(slot)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                self.answer(200, fake.info)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.answer(*(fake.generate(body) if self.path == "/generate" else (200, {})))

            def answer(self, status: int, body: dict[str, Any]) -> None:
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                with contextlib.suppress(BrokenPipeError):  # the worker was stopped
                    self.end_headers()
                    self.wfile.write(raw)

        return Handler


@contextmanager
def fake_sglang(
    target: Path,
    folder: Path,
    *,
    aux_layer_ids: tuple[int, ...] = (2, 4, 5),
    ring_bytes: int = 1 << 22,
    encoding: str = "bf16",
    final_encoding: str = "bf16",
) -> Iterator[FakeSGLang]:
    hidden = json.loads((target / "config.json").read_text())["hidden_size"]
    Ring.create(str(folder / "ring"), ring_bytes, Layout(hidden, encoding, final_encoding))
    fake = FakeSGLang(target, folder / "ring", list(aux_layer_ids))
    thread = threading.Thread(target=fake.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.server.shutdown()
        fake.server.server_close()
        thread.join()
