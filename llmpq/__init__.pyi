from llmpq.api import AsyncEngine as AsyncEngine
from llmpq.api import GenerationRequest as GenerationRequest
from llmpq.api import Output as Output
from llmpq.api import OutputChunk as OutputChunk
from llmpq.api import Pipeline as Pipeline
from llmpq.api import SamplingParams as SamplingParams
from llmpq.api import StructuredOutputsParams as StructuredOutputsParams
from llmpq.api import TokenOutput as TokenOutput
from llmpq.api import load_plan as load_plan
from llmpq.api import plan as plan

__version__: str
