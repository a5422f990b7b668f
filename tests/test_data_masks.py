"""Loss masks: exactly the assistant's text and its end-of-turn token, in every template family."""

import numpy as np
import pytest
from helpers_data import make_encoder, make_template, make_tokenizer, supervised_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from eyas.data.encode import Encoder
from eyas.data.records import Conversation, Rejected
from eyas.data.render import render_conversation
from eyas.data.template import ChatTemplate, tool_style, unprompted_header

# Text that templates strip at its ends would differ from what is expected by that alone.
text = st.text(st.characters(codec="utf-8", exclude_characters="\ufdd0\ufdd1"), min_size=1, max_size=30).filter(
    lambda value: value == value.strip() and "<" not in value and "[" not in value
)


def conversation(turns, system=None):
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer, *reasoning in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
        if reasoning:
            messages[-1]["reasoning_content"] = reasoning[0]
    return Conversation(messages, [message["role"] == "assistant" for message in messages])


def masked(encoder, template, talk):
    """Supervised texts of each sample of a conversation."""
    rendered = render_conversation(template, talk, encoder.special)
    encoded = encoder.encode_rendered(rendered)
    for sample, (ids, _) in zip(rendered, encoded, strict=True):
        assert encoder.decode(ids.tolist()) == sample.text
    return [supervised_texts(encoder, ids, mask) for ids, mask in encoded]


# Family, template arguments, what the assistant writes for an answer, and whether all turns fit in one sample (with a
# system text and without).
FAMILIES = [
    ("chatml", {}, lambda a: f"{a}<|im_end|>", True, True),
    ("chatml_marked", {}, lambda a: f"{a}<|im_end|>", True, True),
    ("llama3", {}, lambda a: f"{a}<|eot_id|>", True, True),
    ("qwen3", {}, lambda a: f"<think>\n\n</think>\n\n{a}<|im_end|>", False, False),
    ("qwen3", {"enable_thinking": False}, lambda a: f"{a}<|im_end|>", False, False),
    ("gemma", {}, lambda a: f"{a}<end_of_turn>", True, True),
    ("mistral", {}, lambda a: f" {a}</s>", True, False),
    ("deepseek", {}, lambda a: f"{a}<｜end▁of▁sentence｜>", True, True),
    ("kimi", {}, lambda a: f"{a}<|im_end|>", True, True),
    ("gpt_oss", {}, lambda a: f"<|channel|>final<|message|>{a}<|return|>", False, False),
]
NAMES = [family + ("_no_thinking" if args else "") for family, args, *_ in FAMILIES]
ENCODERS = {family: make_encoder(family) for family, *_ in FAMILIES}


@pytest.mark.parametrize(("family", "args", "written", "one_plain", "one_system"), FAMILIES, ids=NAMES)
@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(text, text), min_size=1, max_size=4), system=st.none() | text)
def test_mask_is_exactly_what_the_assistant_wrote(family, args, written, one_plain, one_system, turns, system):
    found = masked(ENCODERS[family], make_template(family, **args), conversation(turns, system))
    expected = [written(answer) for _, answer in turns]
    if one_system if system else one_plain:
        assert found == [expected]
    else:
        # The template rewrites earlier turns: each turn is learned in the context it was written in.
        assert found == [[answer] for answer in expected]


@pytest.mark.parametrize(
    ("family", "written"),
    [
        ("qwen3", "<think>\n{}\n</think>\n\n{}<|im_end|>"),
        ("gpt_oss", "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>"),
    ],
)
def test_dropped_reasoning_is_still_learned_in_its_own_turn(family, written):
    talk = conversation([("q1", "a1", "r1"), ("q2", "a2", "r2")])
    found = masked(make_encoder(family), make_template(family), talk)
    assert found == [[written.format("r1", "a1")], [written.format("r2", "a2")]]


def test_a_generation_prompt_that_finished_turns_do_not_show_is_refused():
    with pytest.raises(Rejected) as refused:
        masked(make_encoder("deepseek"), make_template("deepseek_thinking"), conversation([("q", "a")]))
    assert refused.value.reason == "generation_prompt_differs"
    assert "<think>" in refused.value.detail


def test_context_only_turns_are_not_supervised():
    talk = conversation([("q1", "a1"), ("q2", "a2")])
    talk.supervised[1] = False
    assert masked(make_encoder("chatml"), make_template("chatml"), talk) == [["a2<|im_end|>"]]


def test_a_token_never_straddles_the_beginning_of_an_answer():
    # "\n\n" is one token of this tokenizer: encoded whole, the prompt's line end would swallow the answer's first one.
    encoder = make_encoder("chatml", merges=[("Ċ", "Ċ")])
    whole = encoder.encode(["<|im_start|>assistant\n\nhello"])[0]
    assert encoder.decode([whole[-6]]) == "\n\n"
    assert masked(encoder, make_template("chatml"), conversation([("q", "\nhello")])) == [["\nhello<|im_end|>"]]


def test_template_without_end_of_turn_token_masks_the_text_alone():
    source = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    source += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    found = masked(make_encoder("chatml"), ChatTemplate(source, "plain"), conversation([("q", "a one"), ("r", "b")]))
    assert found == [["a one", "b"]]


def test_prefix_marking_tokenizer_is_masked_over_the_whole_text():
    """SentencePiece's way: a text begins with "▁", so pieces can't be encoded alone."""
    specials = ["<|im_end|>", "<|im_start|>"]
    letters = [*"abcdefghijklmnopqrstuvwxyz▁\n:?"]
    vocab = {token: i for i, token in enumerate([*specials, "<unk>", *letters])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(specials)
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>"))
    (rendered,) = render_conversation(
        make_template("chatml"), conversation([("why", "because"), ("so", "yes no")]), encoder.special
    )
    ((ids, mask),) = encoder.encode_rendered([rendered])
    assert ids.tolist() == encoder.encode([rendered.text])[0]
    assert [stretch.strip() for stretch in supervised_texts(encoder, ids, mask)] == [
        "because<|im_end|>",
        "yes no<|im_end|>",
    ]


def test_a_slow_tokenizer_gives_the_same(demo_target):
    """Tokenizers without a Rust core (tiktoken ones that come as code) are only asked to encode and decode."""
    fast = AutoTokenizer.from_pretrained(demo_target)

    class Slow:
        added_tokens_decoder, eos_token_id = fast.added_tokens_decoder, fast.eos_token_id
        encode, decode = staticmethod(fast.encode), staticmethod(fast.decode)

        def __len__(self):
            return len(fast)

    talk = conversation([("Hello!", "Good day – 你好."), ("And?", "\n\nThat is all.")])
    template = make_template("chatml")
    slow, quick = Encoder(Slow()), Encoder(fast)
    (rendered,) = render_conversation(template, talk, slow.special)
    for a, b in zip(*(encoder.encode_rendered([rendered])[0] for encoder in (slow, quick)), strict=True):
        assert np.array_equal(a, b)
    ids = slow.encode(["two <|im_end|> tokens"])[0]
    assert slow.decode(ids) == quick.decode(ids) == "two <|im_end|> tokens"


def test_shifted_mask_is_caught():
    encoder = make_encoder("chatml")
    (rendered,) = render_conversation(make_template("chatml"), conversation([("q", "answer")]), encoder.special)
    ((ids, mask),) = encoder.encode_rendered([rendered])
    assert supervised_texts(encoder, ids, mask) == ["answer<|im_end|>"]
    for shift in (-1, 1):
        assert supervised_texts(encoder, ids, np.roll(mask, shift)) != ["answer<|im_end|>"]


def test_real_tokenizer(demo_target):
    tokenizer = AutoTokenizer.from_pretrained(demo_target)
    encoder = Encoder(tokenizer)
    template = ChatTemplate(tokenizer.chat_template, "SmolLM2", tokenizer.special_tokens_map)
    turns = [("What is 7 times 8?", "7 times 8 is 56."), ("Und auf Deutsch?", "  Sechsundfünfzig – 五十六 🎉\n\n")]
    assert masked(encoder, template, conversation(turns)) == [[f"{answer}<|im_end|>" for _, answer in turns]]
    # The same ids as Transformers' own rendering, up to the line end behind the last turn. (An answer that begins with
    # blanks is another matter: encoded whole, they would merge with the prompt's line end.)
    turns = [(question, answer.strip()) for question, answer in turns]
    messages = conversation(turns).messages
    own = tokenizer.apply_chat_template(messages)["input_ids"]
    ((ids, _),) = encoder.encode_rendered(render_conversation(template, conversation(turns), encoder.special))
    assert ids.tolist() == own[: len(ids)]
    assert tokenizer.decode(own[len(ids) :]) == "\n"


@pytest.mark.parametrize(("family", "style"), [("qwen3", "object"), ("kimi", "text"), ("chatml", ""), ("gemma", "")])
def test_tool_style(family, style):
    assert tool_style(make_template(family)) == style


def test_unprompted_header_is_found():
    ignoring = ChatTemplate("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}", "own")
    assert unprompted_header(ignoring) == "<|im_start|>assistant"
    for family in ("chatml", "mistral", "chatml_marked", "gpt_oss"):
        assert unprompted_header(make_template(family)) == ""


def test_specials_of_the_tokenizer():
    tokenizer = make_tokenizer("kimi")
    encoder = Encoder(tokenizer)
    assert set(encoder.special) == set(tokenizer.all_special_tokens) | {
        token.content for token in tokenizer.added_tokens_decoder.values()
    }
    assert encoder.pattern.findall("x<|im_user|>y<|im_end|>") == ["<|im_user|>", "<|im_end|>"]
