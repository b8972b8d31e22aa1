"""A training that loses nodes goes on, and takes new ones in (dissertation chapter 2, Oobleck).

generation.py (who trains together: plain data) · progress.py (what a rank does just now, for its supervisor) ·
member.py (a rank's view: generations, votes on steps)
"""
