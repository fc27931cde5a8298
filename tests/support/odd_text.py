"""Text that `subwords.normalise` changes, and what it becomes; and its odd characters."""

SAME = {
    "  a \t b\u00a0c\u3000d  ": "a b c d",
    "\ufeff\u201eso\u201c \u201aund\u2018 \u2019s": "\"so\" 'und' 's",
    "``x''": '"x"',
    "a\u2010b\u2011c\u2212d\u2014e\u2013f": "a-b-c-d\u2013e\u2013f",
    "\ufb01ne \u00bd … \uff21\uff22": "fine 1\u20442 ... AB",
    "cafe\u0301 so\u00adft z\u200bw\0": "café soft zw",
    "«oui»": "«oui»",
    "line\u2028sep\x85x\r": "line sep x",
    "a\u2581b": "a b",
    "\u00b4`": '"',
}
ODD = "aé'\" \n\u0301\u0338\u1100\u1161\ufe58\ufe63\u2033\u2057\u00a8\U0001f642"
ODD = sorted({*"".join(SAME), *ODD})
