// Order the results of a search: what is called like a word of the query, then pages by what they have to say about it.
function keysOf(query) {
  const stemmer = new Stemmer(), keys = [];
  const keyOf = word => /[_.\d]/.test(word) ? word : stemmer.stemWord(word);
  for (const name of query.match(/[a-z_]\w*(?:\.[a-z_]\w*)*/g) ?? [])
    keys.push(...(RELEVANCE.words[name] ? [name] : name.split(".").map(keyOf)));
  const phrases = keys.slice(1).map((key, i) => `${keys[i]} ${key}`);
  return [...keys, ...phrases];
}

function relevanceOf(page, query) {
  const number = RELEVANCE.pages.indexOf(page);
  const score = list => {
    for (let i = 0; i < list.length; i += 2) if (list[i] === number) return list[i + 1];
    return 0;
  };
  return keysOf(query).reduce((sum, key) => sum + score(RELEVANCE.words[key] ?? []), 0);
}

Scorer.score = ([page, title, anchor, description, score, file, kind]) => {
  const query = (new URLSearchParams(location.search).get("q") ?? "").toLowerCase();
  const relevance = relevanceOf(page, query);
  if (kind !== "object") return relevance;
  const called = query.split(/\s+/).includes(title.toLowerCase().split(".").pop());
  return called ? 10000 + relevance : relevance / 4;
};
