"""Classify the failed model call with which an agent program ended.

A program that ended because the adapter or the engines failed (`starved`) must not count as an agent that failed its
task. A program whose request was refused for what it contained has been ended by the policy's own act, which must not
count as a failure of the machine: then the policy could end rollouts without a verdict. The adapter's answers, by
status, and the exits:

    status  failure of `adapter/dialects/base.py`   exit          why
    400     prompt too long                         context_full  the conversation no longer fits
    413     body too large                          context_full  the conversation no longer fits
    403     turn limit                              turn_limit
    400     invalid request                         crashed       the program, its tools or the policy made it
    404     unknown model, unknown route            crashed       a program asks only for what it was told to use
    400     refused by an endpoint                  crashed       the program or the policy made what it does not take
    408     request not sent in time                starved       the box or the network is too slow
    400     refused by the engine                   starved       the adapter sent what this engine cannot serve
    401     no open session                         starved       before the first answer: no session was ever there
                                                    crashed       after an answer: the agent changed its credentials
    5xx     unavailable, internal; no connection    starved

A 401 of a session that was closed changes nothing: its attempt has ended, and no write of a later exit matches a row.
"""

import re

from activities.harnesses import launcher
from ratchet.types import AgentExit
from sandboxes.base import Sandbox

_TAIL_BYTES = 65_536
# The first words of the adapter's messages (adapter/replies.py, adapter/prompt/prompt_builder.py). The one that stands
# first decides, because behind it the message may quote the request, and with it the policy.
_OWN_WORDS = {
    "prompt is too long": AgentExit.CONTEXT_FULL,
    "request too large": AgentExit.CONTEXT_FULL,
    "turn limit": AgentExit.TURN_LIMIT,
    "invalid request": AgentExit.CRASHED,
    "unknown model": AgentExit.CRASHED,
    "unknown route": AgentExit.CRASHED,
    "the endpoint refused": AgentExit.CRASHED,
    "the engine refused": AgentExit.STARVED,
    "the session token": AgentExit.STARVED,
    "request timed out": AgentExit.STARVED,
    "the service is restarting": AgentExit.STARVED,
    "internal error": AgentExit.STARVED,
}
_FIRST_OWN_WORDS = re.compile("|".join(map(re.escape, _OWN_WORDS)), re.IGNORECASE)
# Words that the vendors' clients put in place of the adapter's. Several answers in a row that were cut off at the token
# limit are caused by the policy, like a full context.
_CLIENT_WORDS = (
    (AgentExit.CONTEXT_FULL, r"context_length_exceeded|context ?window ?exceed|context window|maximum context length"),
    (AgentExit.CONTEXT_FULL, r"context is too large to send"),  # Qwen Code, before it sends the request
    (AgentExit.CONTEXT_FULL, r"output token maximum|request too large|request_too_large"),
    (AgentExit.TURN_LIMIT, r"turn_limit|error_max_turns|limitsexceeded|max_turns|max session turns"),
    (AgentExit.CRASHED, r"\b(?:api error|status)\D{1,9}4(?!01|08|09|25|29)\d\d\b"),
    (AgentExit.STARVED, r"authentication_?error|invalid_api_key|\b401\b"),
    (AgentExit.CRASHED, r"invalid_request_error|not_found_error|permission_error|invalid_prompt"),
    (AgentExit.CRASHED, r"(?:badrequest|notfound|permissiondenied|unprocessableentity)error"),
)
_UNAUTHORISED = re.compile(r"the session token|authentication_?error|invalid_api_key|\b401\b", re.IGNORECASE)


async def last_output(box: Sandbox, attempt: int) -> bytes:
    """Return the last 64 KiB of the program's output, which contain its closing event."""
    found = await box.exec(f"tail -c {_TAIL_BYTES} {launcher.output_path(attempt)}", user="root", check=False)
    return found.stdout.encode()


def exit_of_error(words: str, answered: bool = False) -> AgentExit:
    """Classify an error of a model call by its words, else as `starved`. `answered`: a call was answered before."""
    found = _FIRST_OWN_WORDS.search(words)
    by_client = (exit for exit, pattern in _CLIENT_WORDS if re.search(pattern, words, re.IGNORECASE))
    exit = _OWN_WORDS[found[0].lower()] if found else next(by_client, AgentExit.STARVED)
    if exit is AgentExit.STARVED and answered and _UNAUTHORISED.search(found[0] if found else words):
        return AgentExit.CRASHED
    return exit
