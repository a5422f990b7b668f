"""A small HTTP server that speaks vLLM's and SGLang's protocols and fails on command, as no real engine can be made to.

    python fake_llm_server.py LOG FAULTS [PORT]

It runs no model: its answers are a function of the prompt. It prints its port, and logs each request for more than one
token to LOG as a JSON line. FAULTS is a JSON object: number of such a request (from 1), "*" for all, or "token N" for
prompts that hold that id -> fault.
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

END, VOCAB = 2, 259


def answer_to(prompt: list[int], seed: int = 0) -> list[int]:
    """3 to 8 letters and the end-of-turn token."""
    key = sum((place + 1) * token for place, token in enumerate(prompt)) + seed
    return [3 + (key * 7 + place * key % 11) % 90 + 30 for place in range(3 + key % 6)] + [END]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    log: Path
    faults: dict[str, str]
    lock = threading.Lock()
    count = 0

    def log_message(self, *args: Any) -> None:
        """Nothing on standard error."""

    def do_GET(self) -> None:
        entry = {"id": "tiny", "max_model_len": int(self.faults.get("context", 400))}
        self.reply(200, {"data": [entry]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        sglang = self.path == "/generate"
        prompt = body["input_ids"] if sglang else body["prompt"]
        sampling = body["sampling_params"] if sglang else body
        most = sampling["max_new_tokens"] if sglang else sampling["max_tokens"]
        fault = self.note(body, prompt) if most > 1 else self.faults.get("probe", "")
        if self.path not in ("/generate", "/v1/completions"):
            return self.reply(404, {"error": "no such path"})
        if self.fails(fault):
            return None
        time.sleep(float(self.faults.get("delay_s", 0)))
        ids = answer_to(prompt, sampling.get("seed", sampling.get("sampling_seed")) if sampling["temperature"] else 0)
        finish = "length" if len(ids) > most else "stop"
        ids, seen = ids[:most], prompt
        if fault == "outside":
            ids[0] = VOCAB
        elif fault == "no_end":
            ids, finish = ids[:1], "stop"
        elif fault == "other_prompt":
            seen = [1, *prompt]
        elif fault == "abort":
            finish = "abort"
        if sglang:
            reason = {"type": finish} | ({"matched": END} if finish == "stop" else {})
            return self.reply(200, {"text": "", "output_ids": ids, "meta_info": {"finish_reason": reason}})
        choice = {"text": "", "token_ids": ids, "prompt_token_ids": seen, "finish_reason": finish, "stop_reason": None}
        if fault == "no_ids":
            del choice["token_ids"]
        return self.reply(200, {"choices": [choice]})

    def note(self, body: dict[str, Any], prompt: list[int]) -> str:
        """Log a request; its fault."""
        with Handler.lock:
            Handler.count += 1
            number = Handler.count
            with self.log.open("a") as log:
                log.write(json.dumps({"path": self.path, "key": self.headers["Authorization"], **body}) + "\n")
        poison = next((name for name in self.faults if name.startswith("token ") and int(name[6:]) in prompt), "*")
        return self.faults.get(str(number), self.faults.get(poison, ""))

    def fails(self, fault: str) -> bool:
        """Whether the fault replaces the answer."""
        if fault.isdigit():
            self.reply(int(fault), {"error": {"message": f"made to say {fault}"}})
        elif fault == "garbage":
            self.reply(200, "not a JSON obj", raw=True)
        elif fault == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [{"token_ids": [40, 41')
            self.close_connection = True
        elif fault == "hang":
            time.sleep(3600)
        elif fault == "die":
            os._exit(9)
        else:
            return False
        return True

    def reply(self, status: int, value: Any, raw: bool = False) -> None:
        data = value.encode() if raw else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed are part of the tests."""


if __name__ == "__main__":
    Handler.log, Handler.faults = Path(sys.argv[1]), json.loads(sys.argv[2])
    server = Server(("127.0.0.1", int(sys.argv[3]) if len(sys.argv) > 3 else 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
