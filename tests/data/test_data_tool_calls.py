"""Calls of tools and reasoning: the template gets what transformers gives it, and targets are all that it writes of an
answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetmesh.data import make_source
from hetmesh.errors import SampleError

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<image>"]

QWEN3 = """
{%- if tools %}{{- '<|im_start|>system\\n# Tools' }}
{%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{% endfor %}{{- '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}
{{- '<think>\\n' ~ (m.reasoning_content or '') ~ '\\n</think>\\n\\n' }}{% endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' ~ content ~ '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""As Qwen3's: reasoning is written behind the last question alone."""

LLAMA = """
{%- for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- 'assistant\\n\\n{"name": "' ~ call.name ~ '", "parameters": ' ~ (call.arguments | tojson) ~ '}<|eot|>' }}
{%- else %}{{- m.role ~ '\\n\\n' ~ m.content ~ '<|eot|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- 'assistant\\n\\n' }}{% endif %}"""
"""As Llama 3's: of an answer with a call the content is not written."""

CALL = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "Paris", "days": 2}}}
TEXT_CALL = CALL | {"function": {"name": "weather", "arguments": '{"city":"Paris","days":2}'}}  # OpenAI's form
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
ASK, TOLD = {"role": "user", "content": "Rain?"}, {"role": "tool", "content": "dry", "tool_call_id": "c1"}
CALLS = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, TOLD, {"role": "assistant", "content": "No."}]
THOUGHT = {"role": "assistant", "content": "No.", "reasoning_content": "It is dry."}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A directory `tokenizer`, one token per byte, without a template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("calls")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(root / "tokenizer")
    return root


def source(root, messages, template=QWEN3, **record):
    (root / "data.jsonl").write_text(json.dumps({"id": "t", "messages": messages, **record}) + "\n")
    return make_source(
        "conversations", path=str(root / "data.jsonl"), tokenizer=str(root / "tokenizer"), chat_template=template
    )


def said(data):
    """The tokens, and the text of each run of targets."""
    meta, tokens = data.meta(0), data.load(0).tokens.tolist()
    return tokens, [data._chat.tokenizer.decode(tokens[a:b]) for a, b in meta.targets]


QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call><|im_end|>'
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}<|eot|>'


@pytest.mark.parametrize(
    ("template", "messages", "tools", "targets"),
    [
        (QWEN3, CALLS, TOOLS, [f"\n{QWEN_CALL}", "No.<|im_end|>"]),
        (QWEN3, CALLS, None, [f"\n{QWEN_CALL}", "No.<|im_end|>"]),
        (QWEN3, [ASK, CALLS[1] | {"content": "Let me see."}, TOLD], TOOLS, [f"Let me see.\n{QWEN_CALL}"]),
        (QWEN3, [ASK, CALLS[1] | {"content": None}, TOLD], TOOLS, [f"\n{QWEN_CALL}"]),
        (QWEN3, [ASK, {k: v for k, v in CALLS[1].items() if k != "content"}, TOLD], TOOLS, [f"\n{QWEN_CALL}"]),
        (QWEN3, [ASK, CALLS[1] | {"tool_calls": [CALL, CALL]}], TOOLS, None),
        (QWEN3, [ASK, THOUGHT], None, ["<think>\nIt is dry.\n</think>\n\nNo.<|im_end|>"]),
        (
            QWEN3,
            [ASK, THOUGHT, ASK, THOUGHT],
            None,
            ["No.<|im_end|>", "<think>\nIt is dry.\n</think>\n\nNo.<|im_end|>"],
        ),
        (QWEN3, [ASK, THOUGHT, ASK, CALLS[3]], None, ["No.<|im_end|>", "No.<|im_end|>"]),  # of an earlier answer
        (
            QWEN3,
            [ASK, THOUGHT | CALLS[1], TOLD, THOUGHT],
            TOOLS,
            [f"<think>\nIt is dry.\n</think>\n\n\n{QWEN_CALL}", "<think>\nIt is dry.\n</think>\n\nNo.<|im_end|>"],
        ),
        (LLAMA, CALLS, None, [LLAMA_CALL, "No.<|eot|>"]),
        (LLAMA, [ASK, CALLS[1] | {"content": None}, TOLD], None, [LLAMA_CALL]),
    ],
)
def test_tokens_are_those_of_the_template_and_targets_all_of_an_answer(root, template, messages, tools, targets):
    data = source(root, messages, template, **({} if tools is None else {"tools": tools}))
    tokens, found = said(data)
    expected = data._chat.tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False)
    assert data._chat.tokenizer.decode(tokens) == expected
    assert found == (targets or ["<think>\n\n</think>\n\n" + f"\n{QWEN_CALL[:-10]}" * 2 + "<|im_end|>"])
    as_openai = [
        m | ({"tool_calls": [TEXT_CALL] * len(m["tool_calls"])} if m.get("tool_calls") else {}) for m in messages
    ]
    assert said(source(root, as_openai, template, tools=json.dumps(tools) if tools else None)) == (tokens, found)
    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
    untrained = [m | ({"weight": 0} if i == last else {}) for i, m in enumerate(messages)]
    assert said(source(root, untrained, template, tools=tools)) == (tokens, found[:-1])


NO_THOUGHT = QWEN3.replace("(m.reasoning_content or '')", "''")  # it names the key, and writes nothing of it
WITHIN = """
{%- for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' ~ m.content }}
{%- if m.tool_calls %}{{ m.tool_calls[0].function.name ~ ' ' ~ messages[loop.index].content }}{% endif %}
{{- '<|im_end|>\\n' }}{% elif m.role == 'user' %}{{ m.content ~ '\\n' }}{% endif %}{% endfor %}"""
"""As Gemma 4's: what the tool says is written within the answer."""


@pytest.mark.parametrize(
    ("template", "messages", "record", "message"),
    [
        (LLAMA, CALLS, {"tools": TOOLS}, "writes nothing of 'tools'; remove it from the data, or give a chat_template"),
        (LLAMA, [ASK, THOUGHT], {}, "writes nothing of 'reasoning_content'"),
        (NO_THOUGHT, [ASK, THOUGHT], {}, "writes nothing of 'reasoning_content'"),
        (LLAMA, [ASK, CALLS[1] | {"content": "Let me see."}], {}, "writes nothing of what 'assistant' says"),
        (WITHIN, CALLS, {}, r"where answer 1 is, is not known: \['tool_calls'\] change what is written around it"),
        (LLAMA, [ASK, CALLS[1] | {"tool_calls": [CALL] * 2}], {}, "one call at a time"),
        (QWEN3, [ASK, CALLS[1] | {"function_call": {"name": "x"}}], {}, "writes nothing of 'function_call'"),
        (QWEN3, [ASK, {"role": "assistant", "content": None}], {}, "a part of `content` must be"),
        (
            QWEN3.replace("m.role == 'tool'", "m.role == 'function'").replace(
                "else %}{{- '<|im_start|>' ~", "elif m.role in ('system', 'user') %}{{- '<|im_start|>' ~"
            ),
            CALLS,
            {},
            "writes nothing of what 'tool' says",
        ),
        (
            LLAMA.replace(
                "{%- else %}",
                "{%- elif m.role == 'assistant' and not loop.last %}{{ raise_exception('no') }}{%- else %}",
            ),
            CALLS,
            {},
            r"where answer 1 begins is not known: without \['content', 'tool_calls'\]|without \['tool_calls'\] no",
        ),
        (
            QWEN3,
            [ASK, CALLS[1] | {"tool_calls": [CALL | {"function": {"name": "x", "arguments": "{"}}]}],
            {},
            "its 'arguments' are no JSON",
        ),
    ],
)
def test_what_a_template_leaves_out_or_refuses_is_said(root, template, messages, record, message):
    data = source(root, messages, template, **record)
    with pytest.raises(SampleError, match=f"sample 't': .*{message}"):
        data.meta(0)
