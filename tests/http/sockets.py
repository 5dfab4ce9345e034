"""What stands for a client's connection where the test says how much it takes."""

import socket


class SilentTransport:
    """A transport of whose bytes `size` were not taken, over a socket that tells of nothing."""

    def __init__(self, size):
        self.size = size
        self.is_closed = False
        self._sock = socket.socket()
        self._sock.close()

    def get_write_buffer_size(self):
        return self.size

    def get_extra_info(self, name):
        return self._sock

    def is_closing(self):
        return self.is_closed


class DirectStream:
    """The stream of `entry` on a socket that is the list `sent`, and takes `room` bytes."""

    def __init__(self, entry):
        self.entry = entry
        self.sent = []
        self.room = 1 << 30
        self.num_direct = 0  # frames that the pump wrote

    def send(self, frame):
        taken = frame[: self.room]
        self.sent.append(taken)
        self.num_direct += 1
        self.room -= len(taken)
        if not taken:
            raise BlockingIOError
        return len(taken)

    def spill(self, frame, sent):
        self.sent.append(frame[sent:])
        self.entry.direct = None
