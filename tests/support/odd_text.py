"""Text that `subwords.normalize` changes, and what it becomes; and its odd characters."""

SAME = {
    "  a \t b\u00a0c\u3000d  ": "a b c d",
    "\ufeff\u201eso\u201c \u201aund\u2018 \u2019s": "\"so\" 'und' 's",
    "``x''": '"x"',
    "a\u2010b\u2011c\u2212d\u2014e\u2013f": "a-b-c-d\u2013e\u2013f",
    "\ufb01ne \u00bd … \uff21\uff22": "\ufb01ne \u00bd … \uff21\uff22",
    "cafe\u0301 so\u00adft z\u200bw\0": "café soft zw",
    "«oui»": "«oui»",
    "line\u2028sep\x85x\r": "line sep x",
    "a\u2581b": "a b",
    "\u00b4`": '"',
    "10⁻³ m² ½ ℃ №5 ™ ﬁ": "10⁻³ m² ½ ℃ №5 ™ ﬁ",
    "e\u200b\u0301 \u1fef A\u030a \u212b": "é ' Å Å",
}
ODD = "aé'\" \n\u0301\u0338\u1100\u1161\ufe58\ufe63\u2033\u2057\u00a8\U0001f642"
ODD = sorted({*"".join(SAME), *ODD})

# References by their language, which a perfect translation gives in the spelling of `normalize`.
PERFECT = {
    "de": [
        "10⁻³ sind weniger als 1½ m² „groß“",
        "\u201aso\u2018 — und \u22125 °C … №3",
        "ﬁnden `das\u00b4 e\u0301",
    ],
    "zh": ["我们在城市里有一所房子。", "“你好” 他说今天天气很好"],
    "zh_Hant-TW": ["我們在城市裡有一所房子。"],
    "cmn": ["我们在城市里有一所房子。"],
    "wuu": ["我们在城市里有一所房子。"],
    "chinese": ["我们 在 1999 年 有一所房子。"],
    "jp": ["私たちは街に家を持っています。"],
    "tha_Thai": ["ฉันรักภาษาไทยมากๆ"],
    "lo": ["ຂ້ອຍຮັກພາສາລາວຫຼາຍໆ"],
    "kh": ["ខ្ញុំស្រឡាញ់ភាសាខ្មែរ"],
    "bur": ["ကျွန်တော်မြန်မာစာကိုချစ်တယ်"],
    "shn": ["ႁဝ်းမီးႁိူၼ်းလင်ၼိုင်ႈၼႂ်းဝဵင်း"],
    "bo": ["བོད་ཡིག་ནི་ཡག་པོ་རེད།"],
    "fr": ["«\u00a0Oui\u202f! c\u2019est l\u2019été\u00a0»", "l\u2011eau à 3\u202f000\u00a0€"],
    "ar": ["هذا بيت كبير في المدينة اليوم"],
}
