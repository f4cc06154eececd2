"""`ratchet part gateway`: run the local E2B-compatible sandbox service."""

from pathlib import Path

from ratchet import paths
from stack.parts import Stack


def gateway() -> None:
    """Run the local sandbox gateway."""
    from activities.harnesses.agent_programs import BOX_AGENTS, agents_directory
    from sandbox_gateway import machine_probe
    from sandbox_gateway.python_layer import ensure_python_layer
    from sandbox_gateway.serve import serve_gateway
    from sandbox_gateway.settings import GatewaySettings
    from sandboxes.e2b import image_metadata_key

    stack = Stack()
    machine_probe.require_sandbox_support()
    agents_directory().mkdir(mode=0o755, parents=True, exist_ok=True)
    serve_gateway(
        GatewaySettings(
            root_directory=stack.home / "boxes",
            api_key=stack.environment()["E2B_API_KEY"],
            port=stack.ports["gateway"],
            egress_ports=(int(stack.environment()["ADAPTER_PORT"]),),
            max_boxes=256,
            image_metadata_key=image_metadata_key(),
            images_directory=paths.images(),
            layers={"/opt/ratchet": ensure_python_layer(paths.cache()), BOX_AGENTS: agents_directory()},
            hidden_directories=(Path.cwd(), stack.home),
        )
    )
