from pathlib import Path
from gpuherd.models.names import ModelRef
def locate(ref: ModelRef) -> Path:
    assert ref.path
    return ref.path
