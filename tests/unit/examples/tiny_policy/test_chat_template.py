"""The chat template: the text of the agent's messages, and that prompts only grow at their end.

Exact token capture depends on it, and the warm start imitates text that never passed through the template.
"""

import random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from activities.harnesses.bash_agent.agent import BASH_TOOL
from activities.harnesses.bash_agent.harness import DEFAULT_SYSTEM_PROMPT
from examples.recipes import RECIPES
from examples.tiny_policy.bug_tasks import BugTask
from examples.tiny_policy.conversation import TURN_END, Piece, call_text, called_command
from examples.tiny_policy.warm_start import encode_pieces

Message = dict[str, Any]


def render(tokenizer: PreTrainedTokenizerFast, messages: list[Message], generate: bool = True) -> str:
    text = tokenizer.apply_chat_template(messages, tools=[BASH_TOOL], add_generation_prompt=generate, tokenize=False)
    assert isinstance(text, str)
    return text


def assistant_message(turn: str) -> Message:
    """Return the message that a tool parser makes of a sampled turn without its stop token."""
    command = called_command(turn)
    if command is None:
        return {"role": "assistant", "content": turn}
    call = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": {"command": command}}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def prompts_and_turns(tokenizer: PreTrainedTokenizerFast, task: BugTask, pieces: list[Piece]) -> list[tuple[str, str]]:
    """Render the conversation through the template: the prompt of every turn, and the turn."""
    messages: list[Message] = [
        {"role": "system", "content": DEFAULT_SYSTEM_PROMPT},
        {"role": "user", "content": task.issue},
    ]
    found = []
    for piece in pieces[1:]:
        if piece.sampled:
            found.append((render(tokenizer, messages), piece.text))
            messages.append(assistant_message(piece.text.removesuffix(TURN_END)))
        else:
            observation = piece.text.split("<tool_response>\n")[1].split("\n</tool_response>")[0]
            messages.append({"role": "tool", "tool_call_id": "call_1", "content": observation})
    return found


def draw_transcript(name: str, seed: int) -> tuple[BugTask, list[Piece]]:
    recipe, rng = RECIPES[name], random.Random(seed)
    task = recipe.draw_task(rng, recipe.kinds[0])
    return task, recipe.write_transcript(task, rng, recipe.settings.noisy_mix)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("seed", range(40))
def test_transcripts_are_what_the_template_makes_of_the_messages(
    tokenizer: PreTrainedTokenizerFast, name: str, seed: int
) -> None:
    task, pieces = draw_transcript(name, seed)
    before = ""
    for number, (prompt, turn) in enumerate(prompts_and_turns(tokenizer, task, pieces)):
        assert prompt == "".join(piece.text for piece in pieces[: 2 * number + 1])
        assert prompt.startswith(before)
        before = prompt + turn


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("seed", range(20))
def test_prompt_ids_start_with_the_prompt_before_and_the_sampled_ids(
    tokenizer: PreTrainedTokenizerFast, name: str, seed: int
) -> None:
    task, pieces = draw_transcript(name, seed)
    before: list[int] = []
    for prompt, turn in prompts_and_turns(tokenizer, task, pieces):
        ids = tokenizer.encode(prompt)
        assert ids[: len(before)] == before
        before = ids + tokenizer.encode(turn)
    assert encode_pieces(tokenizer, pieces)[0] == before


def test_several_calls_and_their_results_share_a_turn_each(tokenizer: PreTrainedTokenizerFast) -> None:
    calls = [{"function": {"name": "bash", "arguments": {"command": command}}} for command in ("ls", "pwd")]
    messages: list[Message] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "Look.", "tool_calls": calls},
        {"role": "tool", "content": "a"},
        {"role": "tool", "content": "b"},
    ]
    expected_turn = f"Look.{call_text('ls')}\n{call_text('pwd')}"
    assert render(tokenizer, messages) == (
        f"<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n{expected_turn}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_arguments_that_are_no_text_are_rendered_as_json(tokenizer: PreTrainedTokenizerFast) -> None:
    call = {"function": {"name": "bash", "arguments": {"command": "ls", "timeout": 3, "flags": ["a"]}}}
    text = render(tokenizer, [{"role": "assistant", "content": "", "tool_calls": [call]}], generate=False)
    assert '<parameter=timeout>\n3\n</parameter>\n<parameter=flags>\n["a"]\n</parameter>\n</function>' in text


def test_tool_schemas_are_not_rendered(tokenizer: PreTrainedTokenizerFast) -> None:
    assert "Runs a command" not in render(tokenizer, [{"role": "user", "content": "u"}])


def test_a_parser_sees_the_marks_and_not_the_control_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode(call_text("ls") + TURN_END)
    assert tokenizer.decode(ids, skip_special_tokens=True) == call_text("ls")
    assert tokenizer.decode(ids) == call_text("ls") + TURN_END
    assert ids[-1] == tokenizer.eos_token_id
