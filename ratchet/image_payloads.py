"""Argument and result of the BuildImage workflow; the rules of `payloads.py` apply."""

from ratchet.payloads import Payload, StageOptions, StartInput


class BuildImageInput(StartInput):
    """`image`: the reference, whose build context a task has. `stage`: options of the activity."""

    image: str
    stage: StageOptions


class BuildImageResult(Payload):
    """`seconds`: how long the build took."""

    image: str
    seconds: float = 0.0
