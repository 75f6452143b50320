"""Framework state turned into shards and plain data, and back. An adapter says where each piece of live memory lies in
its tensor; it does not plan, and it opens no file.
"""
