"""Words in the names of columns, in English and other languages.

`texto`, `clean_text` and `is_spam` are found by them if no column has a name that a task's spec
lists, and no other column may be meant. Messages propose columns by more of them.
"""

from __future__ import annotations

import re

_WORDS = re.compile(r"[\s_.-]+|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def words_of(name: str) -> list[str]:
    """Return the words of a column's name, the last one in the singular; [""] without any."""
    words = [word.lower() for word in _WORDS.split(name.strip().rstrip("0123456789")) if word]
    *qualifiers, noun = words or [""]
    return [*qualifiers, f"{noun[:-3]}y" if noun.endswith("ies") else noun.removesuffix("s")]


def _words(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


TEXT_NOUNS = _words(
    "text review comment tweet sentence message content utterance narrative headline body post"
)
"""Last words of names of texts: `clean_text`."""
LABEL_NOUNS = _words(
    "label rating sentiment category class emotion intent topic stars polarity score type group",
    "priority status reason specialty severity department",
)
"""Last words of names of labels: `overall_rating`."""
LABEL_MARKS = _words("is has")
"""First words of names of labels: `is_depression`."""
TEXTS = _words(
    "feedback narrative resume example comments reviews verbatim transcription summary subject",
    "notes note opinion response story tweets sentences complaint transcript clause",
    "phrase",
    "kommentar rezension bewertungstext nachricht satz inhalt beitrag freitext",  # German
    "texte commentaire avis phrase contenu",  # French
    "texto comentario reseña opinión opinion frase contenido mensaje",  # Spanish
    "testo commento recensione contenuto messaggio",  # Italian
    "comentário resenha conteúdo mensagem",  # Portuguese
    "tekst opmerking recensie zin bericht inhoud",  # Dutch
    "komentarz opinia recenzja zdanie treść",  # Polish
    "текст отзыв комментарий сообщение предложение відгук коментар",  # Russian, Ukrainian
    "metin yorum cümle mesaj görüş",  # Turkish
    "文本 内容 评论 句子 正文 评论内容",  # Chinese
    "本文 テキスト 文 文章 レビュー コメント",  # Japanese
    "텍스트 문장 내용 리뷰 본문 댓글",  # Korean
    "نص النص تعليق التعليق تغريدة",  # Arabic
    "पाठ टेक्स्ट टिप्पणी वाक्य",  # Hindi
    "teks ulasan komentar kalimat",  # Indonesian
    "recension meddelande anmeldelse komentář recenze κείμενο σχόλιο",  # Swedish to Greek
)
"""Names of texts, most of them in other languages."""
LABELS = _words(
    "type status priority queue department group tag product genre",
    "toxicity toxic spam hate class_name",
    "annotation polarity overall points grade clickbait sarcasm",
    "sarcastic generated outcome severity",
    "etikett kategorie klasse stimmung sterne bewertung thema absicht",
    "étiquette catégorie classe note étoiles thème",
    "etiqueta categoría clase sentimiento polaridad estrellas valoración puntuación calificación",
    "etichetta categoria sentimento voto stelle valutazione argomento",
    "rótulo nota estrelas polaridade",
    "categorie sterren onderwerp beoordeling",
    "etykieta kategoria klasa sentyment ocena",
    "метка категория класс тональность оценка рейтинг мітка категорія клас оцінка",
    "etiket kategori sınıf duygu puan durum",
    "标签 类别 分类 情感 情绪 评分",
    "ラベル カテゴリ カテゴリー 感情 評価 分類 極性",
    "레이블 라벨 카테고리 감정 평점 분류",
    "تصنيف التصنيف الفئة المشاعر التقييم",
    "लेबल श्रेणी भावना",
    "sentimen",
    "betyg vurdering štítek hodnocení třída ετικέτα κατηγορία συναίσθημα",
)
"""Names of labels, most of them in other languages."""
QUESTIONS = _words(
    "frage anweisung eingabe pregunta instrucción domanda istruzione pergunta instrução vraag",
    "pytanie вопрос питання soru 问题 指令 質問 指示 질문 سؤال السؤال प्रश्न",
    "pertanyaan fråga otázka",
)
"""Names of questions and prompts in other languages."""
ANSWERS = _words(
    "antwort ausgabe respuesta réponse risposta resposta antwoord odpowiedź ответ відповідь",
    "cevap yanıt 回答 答案 输出 応答 答え 답변 대답 إجابة الإجابة جواب उत्तर jawaban svar odpověď",
)
"""Names of answers in other languages."""
ASKING = QUESTIONS | _words(
    "question prompt instruction input user human query q source src context dialogue dialog",
    "article document story problem request ask customer diff docstring documentation incorrect",
    "ungrammatical original transcript abstract kontext contexte contexto artikel",
    "anchor claim premise search ingredients",
)
"""Words in names of what is given to a model that answers, or to a search."""
ANSWERING = ANSWERS | _words(
    "answer response reply output completion assistant ai bot gpt target tgt trg gt summary",
    "highlights headline headlines title solution code sql agent correct corrected standard",
    "paraphrase translation zusammenfassung résumé resumen instructions message func tldr",
)
"""Words in names of what is generated."""
RETRIEVED = ANSWERS | _words(
    "answer response reply passage document doc positive pos func function code product evidence",
    "hypothesis hypo jd candidate",
)
"""Words in names of texts that are found by a query, or compared with another text."""
TEXT_LIKE: frozenset[str] = (
    TEXT_NOUNS
    | TEXTS
    | _words(
        "description comments reviews feedback verbatim opinion",
        "question summary summaries abstract",
        "transcription narrative resume email data example phrase clause",
        "utt statement complaint note",
        "notes func code anfrage response describe improve open",
        "excerpt article document story poem",
        "quote answer query title subject selftext full",
    )
)
"""Words in names of texts that messages propose."""
LABEL_LIKE: frozenset[str] = (
    LABEL_NOUNS
    | LABEL_MARKS
    | LABELS
    | _words(
        "target type stance score priority queue group department abteilung status reason tag tags",
        "flag annotation class_name specialty diagnosis code stage toxicity hate spam variety",
        "product team outcome y result grade quality relevance overall stars generated",
        "fraudulent clickbait segment severity ground truth satisfied verdict",
        "decision l1 terms answer",
        "correct choice sarcastic cyberbullying assignment points nps activity subtask a richtig",
    )
)
"""Words in names of labels that messages propose, among other columns of few values."""
