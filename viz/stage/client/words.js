// Every word of the page stands in the catalogue (viz/words/en.py and the other languages) and arrives in LANGUAGES.
// WORDS.play is a text; WORDS.stepOf(step, last) is a template, its arguments in the order of the English one.
const WORDS = {};
let spoken = "en";

const template = (key) => (LANGUAGES[spoken] || {})[key] ?? LANGUAGES.en[key];
const fieldsOf = (text) => [...new Set([...[text].flat().join().matchAll(/\{(\w+)/g)].map((m) => m[1]))];

// str.format with {name} and {name:,}; of [one, many] `n` decides. Null where a field is missing or no number.
function fill(text, fields) {
  let whole = true;
  const said = (Array.isArray(text) ? text[Number(fields.n) === 1 ? 0 : 1] : text).replace(/\{(\w+)(:,)?\}/g, (_, name, comma) => {
    const value = Array.isArray(fields[name]) ? fields[name].join(", ") : fields[name];
    whole &&= value !== undefined && value !== null && !(comma && typeof value !== "number");
    return whole ? (comma ? thousands(value, 9) : String(value)) : "";
  });
  return whole ? said : null;
}

// Fill WORDS in a language; one that we do not speak is English. Returns the one that is spoken.
function speak(language) {
  spoken = LANGUAGES[language] ? language : "en";
  for (const [key, english] of Object.entries(LANGUAGES.en)) {
    if (!key.startsWith("ui.")) continue;
    const path = key.split(".").slice(1), last = path.pop(), names = fieldsOf(english), text = template(key);
    const group = path.reduce((at, part) => (at[part] ??= {}), WORDS);
    group[last] = names.length ? (...values) => fill(text, Object.fromEntries(names.map((name, i) => [name, values[i]]))) : text;
  }
  return spoken;
}

// One of our languages out of BCP 47 tags, the first wish first; null if we speak none of them.
const ours = (wishes) => wishes.map((w) => String(w).slice(0, 2).toLowerCase()).find((w) => Object.hasOwn(LANGUAGES, w)) || null;

// What stands under a key, else what the server sent: titles of views and examples, names of knobs.
const named = (key, otherwise) => template(key) ?? otherwise;

// English that the server sent as it is, said in the language where one of the catalogue's phrases fits.
const shapes = new Map();
function phrase(text, group) {
  for (const [key, english] of Object.entries(LANGUAGES.en)) {
    if (!key.startsWith(`phrase.${group}.`)) continue;
    if (!shapes.has(key)) shapes.set(key, new RegExp("^" + english.replace(/[.*+?^$|()[\]\\]/g, "\\$&").replace(/\{(\w+)\}/g, "(?<$1>.+?)") + "$"));
    const found = shapes.get(key).exec(text);
    if (found) return fill(template(key), found.groups || {}) ?? text;
  }
  return text;
}

// A refusal or fault in words, by its code and fields (viz/words/errors.py does the same); else the sentence that came.
function sentenceOf({ code, fields, sentence }) {
  const given = { ...fields, sentence: phrase(String(sentence ?? ""), "said") };
  if (given.rule !== undefined) given.rule = phrase(String(given.rule), "rule");
  for (const key of [...Object.keys(given).map((name) => `error.${code}.${name}`), `error.${code}`]) {
    const said = template(key) === undefined ? null : fill(template(key), given);
    if (said) return said;
  }
  return given.sentence;
}
