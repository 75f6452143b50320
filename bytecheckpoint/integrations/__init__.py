"""The library behind the calls of training frameworks, a module or a package for each, which alone imports its
framework; `shared/` has what several of them use.
"""
