"""Looks into files of models before a framework opens them: what would run code, or touch other files?"""
