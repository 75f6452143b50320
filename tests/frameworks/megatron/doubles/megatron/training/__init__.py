"""Stands in for megatron.training, which is in no wheel of megatron-core that runs with this Python: the names, the
arguments and the order of calls that bytecheckpoint.integrations.megatron meets in Megatron-LM, and none of its code.
"""
