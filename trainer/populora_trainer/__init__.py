"""The engine: trains a population of LoRA adapters on one frozen base model.

It reads a `PopulationRun` from `populora_api` and must not import anything of the controller.
"""
