"""Run by vLLM's interpreter: answer prompts with a drafter, greedily, one after another, and count acceptance.

Argument: JSON of {"target", "draft", "drafts", "tokens", "prompts": [[token id]]}.
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams, TokensPrompt  # noqa: E402  after the setting above

wanted = json.loads(sys.argv[1])
engine = LLM(
    model=wanted["target"],
    dtype="float32",
    enforce_eager=True,
    max_model_len=256,
    max_num_seqs=1,
    disable_log_stats=False,
    enable_prefix_caching=False,
    speculative_config={"method": "eagle3", "model": wanted["draft"], "num_speculative_tokens": wanted["drafts"]},
)
prompts = [TokensPrompt(prompt_token_ids=ids) for ids in wanted["prompts"]]
answers = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=wanted["tokens"], stop_token_ids=[2]))
figures = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in engine.get_metrics()}
result = {
    "outputs": [list(answer.outputs[0].token_ids) for answer in answers],
    "verifications": figures["drafts"].value,
    "accepted_at": figures["accepted_tokens_per_pos"].values,
}
print("RESULT" + json.dumps(result))
