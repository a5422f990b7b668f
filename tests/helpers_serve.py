"""A stand-in for SGLang's package and server, for what a real one can't be made to show on demand, and quickly.

It is a package `sglang` of a chosen version in a folder for PYTHONPATH, with an argument parser of a few real flags and
a `launch_server` that goes through the layers of readiness and does at one of them what STAND_IN says.
"""

import sys
from pathlib import Path

from eyas.run import Run, open_run

FLAGS = """
import argparse

class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        on = ("--trust-remote-code", "--disable-radix-cache", "--disable-cuda-graph", "--skip-tokenizer-init",
              "--disable-prefill-cuda-graph", "--disable-piecewise-cuda-graph",
              "--enforce-disable-flashinfer-allreduce-fusion",
              "--enable-two-batch-overlap", "--enable-mixed-chunk", "--enable-layernorm-sp", "--enable-pdmux",
              "--enable-return-aux-hidden-states", "--disable-custom-all-reduce", "--skip-server-warmup")
        for flag in on:
            parser.add_argument(flag, action="store_true")
        for flag in ("--model-path", "--dtype", "--device", "--host", "--speculative-algorithm", "--attention-backend",
                     "--api-key"):
            parser.add_argument(flag)
        for flag, default in (("--port", 30000), ("--random-seed", None), ("--max-total-tokens", None), ("--nnodes", 1),
                              ("--tp-size", 1), ("--pp-size", 1), ("--dp-size", 1), ("--base-gpu-id", 0)):
            parser.add_argument(flag, type=int, default=default)
        parser.add_argument("--mem-fraction-static", type=float)
        parser.add_argument("--return-aux-hidden-state-layer-ids", type=int, nargs="+")
"""

LAUNCH = """
import http.server, json, os, sys, threading, time
import argparse
from sglang.srt.server_args import ServerArgs

does = os.environ.get("STAND_IN", "")
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
arguments = parser.parse_args()
tap = json.load(open(os.environ["EYAS_TAP"])) if "EYAS_TAP" in os.environ else None

def tell(event, rank=-1, **more):
    line = {"t": time.time(), "pid": os.getpid(), "rank": rank, "event": event} | more
    if tap:
        with open(tap["events"], "a") as events:
            events.write(json.dumps(line) + "\\n")

# As tap/sglang.py does: under the official flag layers are read back at the first forward pass, by the rank that sends.
unread = [0] if arguments.enable_return_aux_hidden_states else []
def forward():
    while unread:
        tell("layers", unread.pop(), read=tap and tap["aux_layer_ids"])

def misbehave(layer):
    if does == f"die at {layer}":
        print("RuntimeError: " + os.environ.get("LAST_WORDS", "it broke"), flush=True)
        sys.exit(3)
    if does == f"idle at {layer}":
        time.sleep(3600)
    while does == f"spin at {layer}":
        pass
    if does == f"work at {layer}":
        for step in range(6):
            print(f"step {step}", flush=True)
            time.sleep(0.7)

print("starting", flush=True)
misbehave("plugin loaded")
tell("plugin", role="scheduler")
misbehave("weights loaded")
if does == "refuse":
    tell("refused", seen="SGLang runs with pp_size=2", expected="pp_size=1", cause="only the last rank's layers")
    time.sleep(3600)
print("Load weight end. elapsed=0.1 s", flush=True)
for rank in range(arguments.tp_size):
    tell("weights", rank, model="StandIn")
    if not arguments.enable_return_aux_hidden_states:
        tell("layers", rank, read=tap and tap["aux_layer_ids"])
if does == "lose the ring":
    os.unlink(tap["ring"])
if does == "write nonsense":
    with open(tap["events"], "a") as events:
        events.write("nonsense\\n")
    time.sleep(3600)
misbehave("listening")

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *more): ...
    def answer(self, status, body=None):
        text = json.dumps(body or {}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def do_GET(self):
        self.answer(503 if does == "idle at warm" else 200)
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        forward()
        if does == "refuse requests":
            return self.answer(400, {"error": "no such request"})
        meta = {"finish_reason": {"type": "length"}, "prompt_tokens": len(asked["input_ids"])}
        self.answer(200, {"output_ids": [1], "meta_info": meta})

server = http.server.ThreadingHTTPServer((arguments.host, arguments.port), Handler)
if does != "idle at warm" and not arguments.skip_server_warmup:
    forward()
if does != "idle at warm":
    print("The server is fired up and ready to roll!", flush=True)
server.serve_forever()
"""

RECIPE = """
name = "t"
runs_dir = "{runs}"
target.path = "{target}"
data.sources = [{{ path = "unused.jsonl" }}]
data.max_tokens = 256
capture.ring_bytes = 1048576
[engine]
kind = "sglang"
dtype = "float32"
device = "cpu"
python = "{python}"
patience_s = 3.0
env = {{ PYTHONPATH = "{path}", STAND_IN = "{does}" }}
"""


def make_stand_in(folder: Path, version: str = "0.5.23") -> Path:
    """Write the package; returns the folder for PYTHONPATH."""
    files = {
        "sglang/__init__.py": "",
        "sglang/srt/__init__.py": "",
        "sglang/srt/server_args.py": FLAGS,
        "sglang/launch_server.py": LAUNCH,
        f"sglang-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def stand_in_run(
    folder: Path, target: Path, does: str = "", *overrides: str, version: str = "0.5.23", profile: str = "extraction"
) -> Run:
    """A run whose engine is the stand-in, which does `does`."""
    path = make_stand_in(folder / f"engine-{version}", version)
    recipe = folder / "recipe.toml"
    values = {"runs": folder / "runs", "target": target, "python": sys.executable, "path": path, "does": does}
    recipe.write_text(RECIPE.format(**values))
    return open_run(recipe, [f"engine.profile={profile}", *overrides])
