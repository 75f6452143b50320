"""Adapters through which training frameworks save and load with this library. Each framework has one module or package,
and only that one imports the framework; `shared/` holds code that several of them use.
"""
