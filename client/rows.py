"""The answer to a question about the store: a list of JSON objects that can become a data frame."""

from typing import Any

from ratchet.errors import MachineError
from ratchet.types import JsonObject


class Rows(list[JsonObject]):
    """Rows of one report, in the order of the report."""

    def frame(self) -> Any:
        """Return the rows as a pandas data frame. Raises MachineError without pandas."""
        try:
            import pandas
        except ImportError:
            raise MachineError("pandas is not installed, which data frames need: `pip install pandas`") from None
        return pandas.DataFrame(list(self))
