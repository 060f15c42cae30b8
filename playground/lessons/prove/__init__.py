"""Do N ranks equal one process with the whole batch?"""
