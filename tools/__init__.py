"""The command line, installed as `bytecheckpoint.tools`: what the library knows of checkpoints, for people and for
scripts. docs/cli.md describes each command.
"""
