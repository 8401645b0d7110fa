import requests

from omniq import task


@task
def count_words_at_url(url: str) -> int:
    return len(requests.get(url, timeout=10).text.split())
