"""Split CSV lines with quoted fields."""

from __future__ import annotations

from ingest.errors import IngestError


def split_quoted(line: bytes, delimiter: int) -> list[bytes]:
    """Split a CSV line; a field that begins with a quote ends at the next single quote, and "" in it is one quote."""
    fields, place, end = [], 0, len(line)
    separator = bytes([delimiter])
    while True:
        if line[place : place + 1] == b'"':
            close = place + 1
            while True:
                close = line.find(b'"', close)
                if close < 0:
                    raise IngestError("quoted field is not closed on its line")
                if line[close + 1 : close + 2] != b'"':
                    break
                close += 2
            fields.append(line[place + 1 : close].replace(b'""', b'"'))
            place = close + 1
            if place < end and line[place : place + 1] != separator:
                raise IngestError("text after a closing quote")
        else:
            stop = line.find(separator, place)
            stop = end if stop < 0 else stop
            fields.append(line[place:stop])
            place = stop
        if place >= end:
            return fields
        place += 1
