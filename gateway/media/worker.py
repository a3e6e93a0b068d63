"""A media worker: a process that decodes hostile files for the gateway, one at a time.

Run as ``python -m gateway.media.worker FD`` with a socket that it inherits. It holds no credentials
and knows no peer but that socket.
"""

import dataclasses
import socket
import sys
from collections.abc import Callable
from typing import Any

from gateway.media import sandbox
from gateway.media.audio import decode_waveform, probe_audio
from gateway.media.channel import Kind, WorkerEnd
from gateway.media.image import decode_image, probe_image
from gateway.media.limits import Limits
from gateway.media.sniff import FORMATS, Format
from gateway.media.video import decode_frames, probe_video
from mimo.errors import MimoError
from mimo.store.keys import content_digest_image


class Job:
    """One file and what to do with it. ``run`` sends the results as they come."""

    def __init__(self, fields: dict[str, Any], source: bytes, gateway: WorkerEnd) -> None:
        self._source = source
        self._gateway = gateway
        self._format: Format = FORMATS[fields["format"]]
        self._limits = Limits(**fields["limits"])
        self._parameters: dict[str, Any] = fields["parameters"]
        self._operation = _OPERATIONS[fields["operation"]]

    def run(self) -> None:
        self._operation(self)

    def probe_image(self) -> None:
        facts = probe_image(self._source, self._format, limits=self._limits, **self._parameters)
        self._report("image", facts)

    def probe_audio(self) -> None:
        self._report("audio", probe_audio(self._source, self._format, self._limits))

    def probe_video(self) -> None:
        facts = probe_video(self._source, self._format, limits=self._limits, **self._parameters)
        self._report("video", facts)

    def decode_image(self) -> None:
        pixels = decode_image(self._source, self._format, limits=self._limits, **self._parameters)
        self._gateway.send_json(Kind.FACTS, {"content_digest": content_digest_image(pixels)})
        self._gateway.send_data(pixels.data)

    def decode_waveform(self) -> None:
        pieces = decode_waveform(
            self._source, self._format, limits=self._limits, **self._parameters
        )
        self._stream(pieces)

    def decode_frames(self) -> None:
        frames = decode_frames(self._source, self._format, limits=self._limits, **self._parameters)
        self._stream(frames)

    def _report(self, kind: str, facts: Any) -> None:
        self._gateway.send_json(Kind.FACTS, {"kind": kind, **dataclasses.asdict(facts)})

    def _stream(self, arrays: Any) -> None:
        for array in arrays:
            if self._gateway.is_stopped():
                return
            self._gateway.send_data(array.data)


_OPERATIONS: dict[str, Callable[[Job], None]] = {
    operation.__name__: operation
    for operation in (
        Job.probe_image,
        Job.probe_audio,
        Job.probe_video,
        Job.decode_image,
        Job.decode_waveform,
        Job.decode_frames,
    )
}


def serve(gateway: WorkerEnd) -> None:
    """Work until the gateway hangs up."""
    for fields, source in gateway.jobs():
        sandbox.limit_job(cpu_s=fields["cpu_s"], memory_bytes=fields["memory_bytes"])
        try:
            Job(fields, source, gateway).run()
        except MimoError as error:
            gateway.send_json(
                Kind.FAILED,
                {"reason": error.reason, "message": error.message, "metadata": error.metadata},
            )
        else:
            gateway.send_done()


def main() -> None:
    descriptor = int(sys.argv[1])
    gateway = WorkerEnd(socket.socket(fileno=descriptor))
    sandbox.enter()
    gateway.send_done()  # ready
    serve(gateway)


if __name__ == "__main__":
    main()
