"""Hangs that are made on purpose: does tracedstore name the ranks that cause them?"""
