"""An agent program that is one shell command: `harness: {name: "tests.standins.shell_agent:ShellAgent"}`."""

from pydantic import BaseModel, ConfigDict

from activities.harnesses.base import BaseHarness, HarnessSpec, Transcript, exports


class ShellOptions(BaseModel):
    """`command`: run by /bin/sh; it finds the adapter at $ADAPTER_URL."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: str


class ShellAgent(BaseHarness):
    name = "shell_agent"
    dialect = "chat"
    options = ShellOptions

    @property
    def version(self) -> str:
        return "1"

    def configure(self, spec: HarnessSpec) -> dict[str, bytes]:
        command = ShellOptions.model_validate(spec.extra).command
        environment = {"ADAPTER_URL": spec.adapter_base_url, **self.environment(spec)}
        return {"command.sh": (exports(environment) + command + "\n").encode()}

    def read_transcript(self, data: bytes) -> Transcript:
        return Transcript(data, num_turns=0, num_steps=0)
