"""transformers without its list of models has every name all the same."""

import subprocess
import sys

CODE = """
import sys
finders = list(sys.meta_path)
from llmpq.dist.model_listing import list_models_when_asked
list_models_when_asked()
sys.modules["torch"] = None  # names need none of it
import transformers
from transformers import models
from transformers.utils import import_utils

assert transformers.AutoConfig.__name__ == "AutoConfig"
assert models.llama.__name__ == "transformers.models.llama" and transformers.models is models
assert "LlamaConfig" not in {**transformers._class_to_module, **models._class_to_module}
assert transformers.LlamaConfig is models.llama.LlamaConfig is models.LlamaConfig
assert not hasattr(transformers, "NoSuchName") and not hasattr(transformers, "__path_of__")
usual = import_utils._LazyModule.__base__
for package, prefix in ((transformers, "models"), (models, None)):
    listed = import_utils.create_import_structure_from_path(models.__file__)
    listed = import_utils.spread_import_structure(listed).values()
    names = {name: place for places in listed for place in places for name in places[place]}
    assert len(names) > 1000 and set(names) <= set(package.__all__) and type(package) is usual
    places = {name: f"{prefix}.{names[name]}" if prefix else names[name] for name in names}
    assert places.items() <= package._class_to_module.items()
assert transformers.PreTrainedConfig.__name__ == "PreTrainedConfig"
assert import_utils.__loader__ is import_utils.__spec__.loader
assert set(finders) <= set(sys.meta_path)
assert not [finder for finder in sys.meta_path if type(finder).__name__ == "_ListingFinder"]
"""


def test_a_name_that_is_not_listed_is_found_as_usual():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
