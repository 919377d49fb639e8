"""Tables in the shape of public data sets, by each kind of base model: read rightly, or refused with
what decides.

An outcome is a task that reads the table (`task | words of what is read`); `? a b`, the tasks that a
refusal lists; or `! words & words` of a refusal. `encoder: x; t5: y` says it of each kind of model.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipe import task_table
from recipe.arguments import parse
from recipe.errors import RecipeError
from recipe.plan import detection
from tests.support.words import WORDS

ROWS = 60
MODELS: dict[str, dict[str, Any]] = {
    "encoder": {"architectures": ["BertModel"]},
    "masked": {"architectures": ["BertForMaskedLM"]},
    "decoder": {"architectures": ["LlamaForCausalLM"]},
    "t5": {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
}
drawn = random.Random(1)
TABLES: dict[str, tuple[Callable[[int], Any], str]] = {}


def s(words: int = 12) -> str:
    return " ".join(drawn.choices(WORDS, k=words))


def o(*values: Any) -> Any:
    return drawn.choice(values)


def chat(key="messages", r="role", c="content", u="user", a="assistant", **more):  # type: ignore[no-untyped-def]
    return lambda n: {
        key: [{r: u, c: s()}, {r: a, c: s()}],
        **{name: value(n) if callable(value) else value for name, value in more.items()},
    }


def add(name: str, row: Callable[[int], Any], outcome: str) -> None:
    TABLES[name] = row, outcome


def annotated(number: int) -> dict[str, Any]:
    """A row of Prodigy's ner.manual; each seventh was ignored."""
    if number % 7 == 3:
        return {"text": "no idea", "_input_hash": number, "answer": "ignore"}
    span = {"start": 0, "end": 3, "label": "PERSON"}
    return {"text": f"Ada {s()}", "_input_hash": number, "spans": [span], "answer": "accept"}


# fmt: off
# classification
add("amazon fine food", lambda n:{"Id":n,"ProductId":f"B{n%9}","UserId":f"U{n}","ProfileName":s(2),"HelpfulnessNumerator":n%4,"HelpfulnessDenominator":n%5,"Score":1+n%5,"Time":1300000000+n,"Summary":s(4),"Text":s(40)},
    "encoder,t5: ? text-classification summarization sentence-embedding reranking; masked: ? text-classification masked-lm summarization sentence-embedding reranking; decoder: ? text-classification causal-lm summarization sentence-embedding reranking")
add("drug reviews", lambda n:{"uniqueID":n,"drugName":o("Valsartan","Guanfacine"),"condition":o("ADHD","Birth Control"),"review":s(30),"rating":1+n%10,"date":"20-May-12","usefulCount":n%30},
    "encoder,t5: ! label_column=rating or label_column=drugName; masked: ? text-classification masked-lm; decoder: ? text-classification causal-lm")
add("wic", lambda n:{"word":o("bank","play"),"sentence1":s(),"sentence2":s(),"start1":n%5,"end1":n%5+4,"start2":n%6,"end2":n%6+4,"label":n%2,"idx":n},
    "? text-classification sentence-embedding reranking")
add("wsc", lambda n:{"text":s(),"span1_index":n%5,"span2_index":n%6,"span1_text":o("Mark","Ann"),"span2_text":o("him","her"),"idx":n,"label":n%2},
    "encoder,t5: ! values in column 'span1_index'; masked: ? text-classification masked-lm; decoder: ? text-classification causal-lm")
add("copa", lambda n:{"premise":s(),"choice1":s(5),"choice2":s(5),"question":o("cause","effect"),"label":n%2,"idx":n},
    "! choose from in 'choice1'")
add("winogrande", lambda n:{"sentence":s()+" _ "+s(),"option1":o("Ann","Bob"),"option2":o("Cy","Di"),"answer":str(1+n%2)},
    "! choose from in 'option1'")
add("piqa", lambda n:{"goal":s(),"sol1":s(),"sol2":s(),"label":n%2},
    "! choose from in 'sol1'")
add("swag", lambda n:{"video-id":f"v{n}","startphrase":s(),"sent1":s(),"sent2":s(2),"gold-source":"gold","ending0":s(),"ending1":s(),"ending2":s(),"ending3":s(),"label":n%4},
    "encoder,masked: multiple-choice; decoder,t5: ! choose from in 'ending0'")
add("hellaswag", lambda n:{"ind":n,"activity_label":o("Baking","Tennis"),"ctx_a":s(),"ctx_b":s(2),"ctx":s(),"endings":[s() for _ in range(4)],"source_id":f"a{n}","split":"train","split_type":"indomain","label":str(n%4)},
    "encoder,masked: multiple-choice; decoder,t5: ! choose from in 'endings'")
add("multirc", lambda n:{"paragraph":s(40),"question":s(8),"answer":s(4),"idx":{"paragraph":n,"question":n,"answer":n},"label":n%2},
    "encoder,decoder: ? text-classification causal-lm sentence-embedding reranking; masked: ? text-classification causal-lm masked-lm sentence-embedding reranking; t5: ? text-classification text2text-generation sentence-embedding reranking")
add("snli", lambda n:{"premise":s(),"hypothesis":s(6),"label":(n%4)-1},
    "text-classification")
add("anli", lambda n:{"uid":f"u{n}","premise":s(20),"hypothesis":s(6),"label":n%3,"reason":s(8)},
    "text-classification")
add("fever", lambda n:{"id":n,"label":o("SUPPORTS","REFUTES"),"claim":s(),"evidence_id":n,"evidence_wiki_url":"Foo_Bar","evidence_sentence_id":n%4},
    "text-classification")
add("liar", lambda n:{"id":f"{n}.json","label":n%6,"statement":s(),"subject":o("taxes","health"),"speaker":o("a","b"),"job_title":s(2),"state_info":o("Texas","Ohio"),"party_affiliation":o("republican","democrat"),"barely_true_counts":n%9,"context":s(4)},
    "! as text_column=statement")
add("hate speech", lambda n:{"count":3,"hate_speech":n%2,"offensive_language":n%4,"neither":n%3,"class":n%3,"tweet":s()},
    "text-classification")
add("toxic sbic", lambda n:{"whoTarget":o("1.0","0.0"),"intentYN":o("1.0","0.0"),"sexYN":o("1.0","0.0"),"offensiveYN":o("1.0","0.5"),"post":s(),"targetMinority":o("","women"),"dataSource":o("reddit","twitter")},
    "! label_column=whoTarget or label_column=intentYN")
add("banking77", lambda n:{"text":s(),"label":n%5,"label_text":f"intent {n%5}"},
    "text-classification")
add("massive", lambda n:{"id":str(n),"locale":"en-US","partition":"train","scenario":n%3,"intent":n%5,"utt":s(),"annot_utt":s(),"worker_id":str(n%9)},
    "! label_column=intent or label_column=scenario")
add("tweet_eval float labels with NaN", lambda n:{"text":s(),"label":float("nan") if n==7 else float(n%2)},
    "! no label in column")
add("sts with NaN", lambda n:{"sentence1":s(),"sentence2":s(),"score":float("nan") if n==7 else n%6/5},
    "? text-classification sentence-embedding reranking")
add("sts of whole numbers", lambda n:{"sentence1":s(),"sentence2":s(),"score":n%6},
    "? text-classification sentence-embedding reranking")
add("disaster tweets of CSV", lambda n:{"id":str(n),"keyword":o("fire","ablaze"),"location":o("London","Leeds"),"text":s(),"target":str(n%2)},
    "encoder,t5: ! label_column=target or label_column=keyword; masked: ? text-classification masked-lm; decoder: ? text-classification causal-lm")
add("sick", lambda n:{"pair_ID":n,"sentence_A":s(),"sentence_B":s(),"relatedness_score":1+n%40/10,"entailment_judgment":o("NEUTRAL","ENTAILMENT")},
    "! label_column=relatedness_score or label_column=entailment_judgment")
add("readability regression", lambda n:{"id":f"a{n}","url_legal":"","license":"","excerpt":s(60),"target":-1.5+n/60,"standard_error":0.4+n/100},
    "text-classification")
add("essays", lambda n:{"essay_id":n,"essay_set":1+n%8,"essay":s(80),"domain1_score":n%12},
    "! label_column=essay_set or label_column=domain1_score")
add("spam assassin", lambda n:{"Unnamed: 0":n,"label":o("ham","spam"),"text":"Subject: "+s(),"label_num":n%2},
    "text-classification")
add("news category", lambda n:{"link":f"https://h/{n}","headline":s(8),"category":o("POLITICS","WELLNESS"),"short_description":s(20),"authors":o("Ann Lee","Bo Xu"),"date":"2022-09-23"},
    "encoder,t5: ! label_column=category or label_column=authors; masked: ? text-classification masked-lm; decoder: ? text-classification causal-lm")
add("bbc", lambda n:{"category":o("tech","sport"),"filename":f"{n:03}.txt","title":s(5),"content":s(40)},
    "encoder,t5: ! as text_column=content; masked: ? text-classification masked-lm; decoder: ? text-classification causal-lm")
add("women clothing", lambda n:{"Unnamed: 0":n,"Clothing ID":700+n%9,"Age":20+n%40,"Title":s(3),"Review Text":s(40),"Rating":1+n%5,"Recommended IND":n%2,"Positive Feedback Count":n%9,"Division Name":o("General","Petite"),"Department Name":o("Tops","Dresses"),"Class Name":o("Knits","Pants")},
    "encoder,t5: ! label_column=Rating or label_column=Recommended IND; masked: ? text-classification masked-lm; decoder: ? text-classification causal-lm")
add("go_emotions", lambda n:{"text":s(),"labels":[n%5] if n%3 else [n%5,(n+1)%5],"id":f"e{n}"},
    "text-classification")
add("reuters", lambda n:{"text":s(30),"text_type":'"NORM"',"topics":[o("grain","oil")],"lewis_split":'"TRAIN"',"cgis_split":'"TRAINING-SET"',"old_id":str(n),"new_id":str(n),"places":["usa"],"people":[],"orgs":[],"exchanges":[],"date":"26-FEB-1987","title":s(5)},
    "encoder,t5: ? sentence-embedding; masked: ? masked-lm sentence-embedding; decoder: ? causal-lm sentence-embedding")
add("toxigen", lambda n:{"text":s(),"target_group":o("asian","women"),"factual?":"x","toxicity_ai":1.0+n%5,"toxicity_human":1.0+n%4},
    "encoder,t5: ! label_column=target_group; masked: ? text-classification masked-lm; decoder: ? text-classification causal-lm")
add("isarcasm", lambda n:{"tweet":s(),"sarcastic":n%2,"rephrase":s(),"sarcasm":n%2,"irony":0,"satire":0},
    "encoder,t5: ! as text_column=tweet; masked: ? text-classification masked-lm; decoder: ? text-classification causal-lm")
add("subj with split col", lambda n:{"text":s(),"label":n%2,"split":"train" if n%5 else "test"},
    "text-classification")
add("doccano classes", lambda n:{"id":n,"text":s(),"label":[o("pos","neg")]},
    "text-classification")
add("doccano comments", lambda n:{"id":n,"data":s(),"label":[o("pos","neg")]},
    "text-classification")
add("labelstudio csv ner", lambda n:{"id":n,"text":"Ada "+s(),"label":[{"start":0,"end":3,"text":"Ada","labels":["PER"]}],"annotator":1,"annotation_id":n,"created_at":"2024-01-01","lead_time":1.5},
    "token-classification")
add("labelbox", lambda n:{"ID":f"c{n}","Labeled Data":s(),"Label":{"classifications":[{"title":"mood","answer":{"value":"good"}}]}},
    "! its columns are ID, Labeled Data")
add("openai classification", lambda n:{"prompt":s()+"\n\n###\n\n","completion":o(" pos"," neg")},
    "encoder,masked: ? text-classification causal-lm; decoder: causal-lm; t5: ? text-classification text2text-generation")
# tokens
add("conll2003", lambda n:{"id":str(n),"tokens":["Ada","saw","Rome"],"pos_tags":[22,38,22],"chunk_tags":[11,21,11],"ner_tags":[1,0,5]},
    "token-classification")
add("gliner", lambda n:{"tokenized_text":["Ada","saw","Rome"],"ner":[[0,0,"person"],[2,2,"city"]]},
    "! columns are tokenized_text, ner")
add("universal ner kaggle", lambda n:{"Sentence #":n,"Sentence":"Ada saw Rome","POS":"['NNP','VBD','NNP']","Tag":"['B-per','O','B-geo']"},
    "token-classification")
add("spacy", lambda n:["Ada saw "+s(),{"entities":[[0,3,"PER"]]}],
    "token-classification")
add("presidio pii", lambda n:{"source_text":"Ada "+s(),"target_text":"[NAME] "+s(),"privacy_mask":[{"value":"Ada","start":0,"end":3,"label":"NAME"}],"span_labels":"[]","mbert_text_tokens":["A"],"mbert_bio_labels":["B-NAME"],"id":n,"language":"English","set":"train"},
    "encoder,masked,decoder: ! as text_column=source_text; t5: text2text-generation")
# QA
add("squad_v2", lambda n:{"id":str(n),"title":"T","context":"Ada "+s(),"question":s(6),"answers":{"text":["Ada"] if n%3 else [],"answer_start":[0] if n%3 else []}},
    "question-answering")
add("natural questions short", lambda n:{"question":s(6),"answer":[s(2)]},
    "encoder,t5: ? sentence-embedding; masked: ? masked-lm sentence-embedding; decoder: ? causal-lm sentence-embedding")
add("triviaqa", lambda n:{"question":s(6),"question_id":f"q{n}","answer":{"value":"Ada","aliases":["Ada L"],"type":"W"},"entity_pages":[]},
    "encoder,t5: ! The label column of; masked: ? masked-lm; decoder: ? causal-lm")
add("hotpot", lambda n:{"id":f"h{n}","question":s(8),"answer":o("yes","no",s(2)),"type":o("bridge","comparison"),"level":o("hard","easy"),"supporting_facts":{"title":["A"],"sent_id":[0]},"context":{"title":["A"],"sentences":[[s()]]}},
    "encoder: ? text-classification causal-lm sentence-embedding; masked: ? text-classification causal-lm masked-lm sentence-embedding; decoder: ! values in column 'context.title'; t5: ? text-classification text2text-generation sentence-embedding")
add("medmcqa", lambda n:{"id":f"m{n}","question":s(),"opa":s(2),"opb":s(2),"opc":s(2),"opd":s(2),"cop":n%4,"choice_type":"single","exp":s(20),"subject_name":o("Anatomy","Surgery"),"topic_name":s(2)},
    "! choose from in 'opa'")
add("pubmedqa", lambda n:{"pubid":n,"question":s(),"context":{"contexts":[s()],"labels":["B"],"meshes":["x"]},"long_answer":s(20),"final_decision":o("yes","no")},
    "encoder,t5: ! label_column=final_decision; masked: ? text-classification masked-lm; decoder: ? text-classification causal-lm")
add("gsm8k", lambda n:{"question":s(20),"answer":s(20)+" #### 4"},
    "encoder: ? causal-lm sentence-embedding; masked: ? causal-lm masked-lm sentence-embedding; decoder: causal-lm; t5: text2text-generation")
add("race", lambda n:{"example_id":f"r{n}","article":s(60),"answer":"ABCD"[n%4],"question":s(),"options":[s(3)]*4},
    "encoder,masked: multiple-choice; decoder,t5: ! choose from in 'options'")
add("narrative qa flat", lambda n:{"document":s(60),"question":s(6),"answer":s(3)},
    "encoder: ? causal-lm sentence-embedding; masked: ? causal-lm masked-lm sentence-embedding; decoder,t5: ! values in column 'document'")
# causal
add("alpaca with text", lambda n:{"instruction":s(),"input":s() if n%2 else "","output":s(),"text":"Below is an instruction "+s(40)},
    "encoder: ? causal-lm; masked: ? causal-lm masked-lm; decoder: ! values in column 'text'; t5: ! values in column 'instruction'")
add("alpaca", lambda n:{"instruction":s(),"input":s() if n%2 else "","output":s()},
    "encoder: ? causal-lm; masked: ? causal-lm masked-lm; decoder: causal-lm; t5: ! values in column 'instruction'")
add("dolly", lambda n:{"instruction":s(),"context":s() if n%2 else "","response":s(),"category":o("open_qa","closed_qa")},
    "encoder,masked,decoder: ? text-classification causal-lm sentence-embedding; t5: ? text-classification text2text-generation sentence-embedding")
add("openorca", lambda n:{"id":f"n{n}","system_prompt":s(),"question":s(),"response":s()},
    "encoder: ? causal-lm sentence-embedding; masked: ? causal-lm masked-lm sentence-embedding; decoder,t5: ! values in column 'system_prompt'")
add("guanaco", lambda n:{"text":"### Human: "+s()+"### Assistant: "+s()},
    "encoder: ? masked-lm; masked: masked-lm; decoder: causal-lm; t5: ? text2text-generation")
add("ultrachat", lambda n:{"prompt":s(),"prompt_id":f"p{n}","messages":[{"role":"user","content":s()},{"role":"assistant","content":s()}]},
    "causal-lm")
add("sharegpt", chat("conversations","from","value","human","gpt",id=lambda n:str(n)),
    "causal-lm")
add("sharegpt system", chat("conversations","from","value","human","gpt",id=lambda n:str(n),system=lambda n:s()),
    "! values in column 'system'")
add("capybara", lambda n:{"source":"x","conversation":[{"input":s(),"output":s()}]},
    "? causal-lm")
add("oasst tree", lambda n:{"message_id":f"m{n}","parent_id":None,"text":s(),"role":o("prompter","assistant"),"lang":o("en","es"),"review_count":3,"rank":n%3},
    "encoder,t5: ! label_column=role or label_column=lang; masked: ? text-classification masked-lm; decoder: ? text-classification causal-lm")
add("lmsys", chat("conversation",conversation_id=lambda n:f"c{n}",model=lambda n:o("vicuna","alpaca"),turn=1,language="English",redacted=False),
    "causal-lm")
add("openhermes", chat("conversations","from","value","human","gpt",source=lambda n:o("a","b"),category=lambda n:o("x",None),skip_prompt_formatting=False),
    "causal-lm")
add("metamath", lambda n:{"query":s(),"response":s(),"type":o("GSM","MATH"),"original_question":s()},
    "encoder,t5: ? text-classification sentence-embedding; masked: ? text-classification masked-lm sentence-embedding; decoder: ? text-classification causal-lm sentence-embedding")
add("openr1", lambda n:{"problem":s(),"solution":s(),"answer":str(n),"problem_type":o("Algebra","NT"),"question_type":"mcq","source":"x","generations":[s()]},
    "! as text_column=problem")
add("codealpaca code", lambda n:{"code":s(30),"docstring":s()},
    "! as text_column=code")
add("wikitext", lambda n:{"text":s(30)},
    "encoder: ? masked-lm; masked: masked-lm; decoder: causal-lm; t5: ? text2text-generation")
add("tokens file", lambda n:{"input_ids":[1,2,3]},
    "encoder: ? masked-lm; masked: masked-lm; decoder: causal-lm; t5: ! The label column of")
add("prompts beside labels", lambda n:{"prompt":s(),"response":s(),"label":o("safe","unsafe")},
    "encoder,masked,decoder: ? text-classification causal-lm sentence-embedding reranking; t5: ? text-classification text2text-generation sentence-embedding reranking")
# preference
add("ultrafeedback bin", lambda n:{"prompt":s(),"prompt_id":f"p{n}","chosen":[{"role":"user","content":"q"},{"role":"assistant","content":s()}],"rejected":[{"role":"user","content":"q"},{"role":"assistant","content":s()}],"messages":[{"role":"user","content":"q"},{"role":"assistant","content":s()}],"score_chosen":8.0,"score_rejected":5.0},
    "? causal-lm preference")
add("hh-rlhf", lambda n:{"chosen":"\n\nHuman: hi\n\nAssistant: "+s(),"rejected":"\n\nHuman: hi\n\nAssistant: "+s()},
    "preference")
add("orca dpo", lambda n:{"system":s() if n%2 else "","question":s(),"chosen":s(),"rejected":s()},
    "! values in column 'system'")
add("trl conversational dpo", lambda n:{"prompt":[{"role":"user","content":s()}],"chosen":[{"role":"assistant","content":s()}],"rejected":[{"role":"assistant","content":s()}]},
    "preference")
add("shp", lambda n:{"post_id":f"p{n}","domain":o("askx","asky"),"upvote_ratio":0.9,"history":s(20),"c_root_id_A":"a","human_ref_A":s(),"human_ref_B":s(),"labels":n%2,"score_A":5,"score_B":9},
    "! 3 columns that may be the text & human_ref_A")
add("kto", lambda n:{"prompt":s(),"completion":s(),"label":n%2==0},
    "encoder,masked,decoder: ? text-classification causal-lm sentence-embedding reranking; t5: ? text-classification text2text-generation sentence-embedding reranking")
add("summarize feedback", lambda n:{"info":{"id":f"t{n}","post":s(40),"title":s(4)},"summaries":[{"text":s()},{"text":s()}],"choice":n%2},
    "! as text_column=info.post")
add("webgpt", lambda n:{"question":{"full_text":s()},"answer_0":s(),"answer_1":s(),"score_0":0.0,"score_1":1.0},
    "! choose from in 'answer_0'")
add("argilla dpo", lambda n:{"instruction":s(),"chosen_response":s(),"rejected_response":s(),"rating_chosen":5},
    "preference")
# retrieval
add("natural-questions pair", lambda n:{"query":s(5),"answer":s(20)},
    "encoder,t5: ? sentence-embedding; masked: ? masked-lm sentence-embedding; decoder: ? causal-lm sentence-embedding")
add("esci", lambda n:{"query":s(3),"product_title":s(8),"esci_label":o("Exact","Irrelevant"),"product_locale":"us"},
    "text-classification")
add("numbers called pos and neg", lambda n:{"text":s(),"pos":n/60,"neg":1-n/60,"label":"ab"[n%2]},
    "encoder,t5: text-classification; masked,decoder: text-classification")
add("bge train", lambda n:{"query":s(4),"pos":[s()],"neg":[s(),s()]},
    "sentence-embedding")
add("trec covid qrels", lambda n:{"query-id":n,"corpus-id":f"d{n}","score":n%3},
    "! label_column=score")
add("ms marco v1", lambda n:{"answers":[s(3)],"passages":{"is_selected":[1,0],"passage_text":[s(),s()],"url":["a","b"]},"query":s(4),"query_id":n,"query_type":"description","wellFormedAnswers":[]},
    "encoder,t5: ? reranking; masked: ? masked-lm reranking; decoder: ? causal-lm reranking")
# seq2seq
add("cnn", lambda n:{"article":s(60),"highlights":s(10),"id":f"c{n}"},
    "encoder: ? summarization; masked: ? masked-lm summarization; decoder: ? causal-lm summarization; t5: summarization")
add("samsum", lambda n:{"id":str(n),"dialogue":s(40),"summary":s(10)},
    "encoder,masked,decoder: ? summarization; t5: summarization")
add("opus", lambda n:{"id":str(n),"translation":{"en":s(),"fr":s()}},
    "encoder,masked,decoder: ! as text_column=translation.en; t5: ! between en and fr")
add("flan", lambda n:{"inputs":s(),"targets":s(),"task":o("a","b")},
    "encoder: ! as text_column=inputs; masked: ? text-classification masked-lm; decoder: ? text-classification causal-lm; t5: text2text-generation")
add("billsum", lambda n:{"text":s(60),"summary":s(20),"title":s(6)},
    "encoder: ? summarization sentence-embedding; masked: ? masked-lm summarization sentence-embedding; decoder: ? causal-lm summarization sentence-embedding; t5: summarization")
add("grammar", lambda n:{"input":"Fix: "+s(),"target":s()},
    "encoder: ! too many for classes; masked: ? masked-lm; decoder: ? causal-lm; t5: text2text-generation")
add("eli5", lambda n:{"q_id":f"q{n}","title":s(8),"selftext":s(10),"answers":{"a_id":["x"],"text":[s()],"score":[3]}},
    "encoder,t5: ! The label column of; masked: ? masked-lm; decoder: ? causal-lm")
add("csv2 tickets", lambda n:{"Ticket Description":s(20),"Ticket Priority":o("low","high")},
    "text-classification")
add("images beside", chat("messages",images=lambda n:["a.jpg"]),
    "! values in column 'images'")
# From issues of users.
add("imdb", lambda n: {"review": s(), "sentiment": o("pos", "neg")},
    "text-classification | 'review', label column 'sentiment'")
add("sms spam", lambda n: {"v1": o("ham", "spam"), "v2": s()},
    "text-classification | 'v2', label column 'v1'")
add("reddit stress", lambda n: {"subreddit": o("ptsd", "anxiety"), "text": s(), "label": n % 2, "confidence": 0.8},
    "text-classification | 'text', label column 'label'")
add("Label Studio", lambda n: {"annotation_id": n, "annotator": 1, "choice": o("Yes", "No"), "id": n, "lead_time": n / 7, "text": s()},
    "text-classification | 'text', label column 'choice'")
add("jigsaw", lambda n: {"id": str(n), "comment_text": s(), "toxic": n % 2, "threat": 0, "insult": n % 3 // 2},
    "text-classification | 'toxic,threat,insult'; not read: id")
add("mrpc", lambda n: {"sentence1": s(), "sentence2": s(), "label": n % 2, "idx": n},
    "text-classification | 'sentence1' and 'sentence2', in this order, label column 'label'")
add("boolq", lambda n: {"question": s(), "answer": n % 2 == 0, "passage": s()},
    "text-classification | 'question' and 'passage', in this order, label column 'answer'")
add("squad", lambda n: {"id": str(n), "context": f"Ada {s()}", "question": s(), "answers": {"text": ["Ada"], "answer_start": [0]}},
    'question-answering | 60 questions')
add("triplets", lambda n: {"query": s(), "positive": s(), "negative": s()},
    "sentence-embedding | queries 'query', texts 'positive', negatives negative")
add("Prodigy's spans", annotated,
    'token-classification | PERSON (51 B, 0 I)')
add("Prodigy's spans without hashes", lambda n: {**annotated(n), "_input_hash": None},
    'token-classification | were not accepted')
add("Prodigy's classes", lambda n: {"text": s(), "label": o("A", "B"), "_input_hash": n, "answer": ["accept", "reject", "ignore"][n % 3]},
    'text-classification | 40 rows of FILE were not accepted')
add("Prodigy's one class", lambda n: {"text": s(), "label": "SPORT", "_input_hash": n, "answer": ["accept", "reject", "ignore"][n % 3]},
    '! one class only')
add("yelp", lambda n: {"review_id": f"r{n}", "stars": 1 + n % 5, "useful": n % 6, "funny": n % 3, "text": s(), "date": "2018-07-07"},
    '! label_column=stars or label_column=useful')
add("airline tweets", lambda n: {"tweet_id": n, "airline_sentiment": o("neutral", "positive"), "name": f"u{n}", "airline": o("United", "Delta"), "retweet_count": n % 2, "text": s()},
    '! label_column=airline_sentiment or label_column=airline')
add("fake news", lambda n: {"title": s(5), "text": s(), "subject": o("politics", "world"), "date": f"December {1 + n % 30}, 2017"},
    '! text_column=text,title')
add("support tweets", lambda n: {"tweet_id": n, "author_id": f"a{n % 9}", "inbound": n % 2 == 0, "created_at": f"Tue Oct 31 22:{n:02d}:47", "text": s()},
    '! label_column=inbound')
add("tickets", lambda n: {"text": s(), "queue": o("IT", "Sales"), "priority": o("low", "high")},
    '! label_column=queue or label_column=priority')
add("questions of programmers", lambda n: {"Title": s(6), "Body": s(), "Tags": o("<python>", "<java>")},
    '! Title & Body')
add("ag_news", lambda n: {"Class Index": 1 + n % 4, "Title": s(6), "Description": s()},
    '! text_column=Description,Title')
add("MELD", lambda n: {"Utterance": s(), "Emotion": o("joy", "anger"), "Sentiment": o("positive", "negative"), "Season": n % 9},
    '! label_column=Sentiment or label_column=Emotion')
add("forum posts", lambda n: {"body": s(), "subreddit": o("news", "funny"), "gilded": n % 2, "score": n - 9},
    '! label_column=subreddit or label_column=gilded')
add("stsb, scored", lambda n: {"sentence1": s(), "sentence2": s(), "score": n / 59},
    '! Give task=text-classification & Give task=sentence-embedding')
add("commonsense_qa", lambda n: {"id": str(n), "question": {"stem": s(), "question_concept": "sun", "choices": [{"text": o("sun", "air"), "label": letter} for letter in "ABCD"]}, "answerKey": "ABCD"[n % 4]},
    "encoder,masked: multiple-choice; decoder,t5: ! answers to choose from in 'question.choices' & (task=reranking)")
add("choices of one letter", lambda n: {"question": s(), **dict.fromkeys("ABCD", s(2)), "answer": "ABCD"[n % 4]},
    "! from in 'A', 'B', 'C', 'D'")
add("choices that are numbers", lambda n: {"question": s(), "option_1": n, "option_2": n + 1, "answer": n % 2},
    "! 'option_1', 'option_2'")
add("triplets by number", lambda n: {"sentence1": s(), "sentence2": s(), "sentence3": s()},
    "! Name one, as text_column=sentence1")
add("mmlu", lambda n: {"question": s(), "choices": [s(2)] * 4, "answer": n % 4},
    "encoder,masked: multiple-choice; decoder,t5: ! 'choices'")
add("sciq", lambda n: {"question": s(), "distractor1": s(1), "distractor2": s(1), "correct_answer": s(1), "support": s()},
    "! 'distractor1'")
add("authors", lambda n: {"id": f"id{n}", "text": s(), "author": o("EAP", "HPL")},
    'masked: ! Give task=masked-lm; decoder: ! Give task=causal-lm; encoder,t5: ! ')
# fmt: on


def read(folder: Path, rows: list[Any], model: str, *argv: str) -> tuple[str | None, str]:
    """The task that is found, and what it reads."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODELS[model]))
    file = folder / "data" / "train.json"
    file.parent.mkdir()
    file.write_text(json.dumps(rows))
    channels = {"train": file.parent}
    given = parse(["--model_id", str(folder / "model"), "--eval_strategy", "no", *argv])
    task, _ = detection.find(given, channels)
    lines = task_table.load(task)(channels, dataclasses.replace(given, task=task)).found
    for line in lines:
        used, _, unread = line.partition("; not read: ")
        assert not [name for name in unread.split(", ") if name and repr(name) in used]
    return task, "\n".join(lines).replace(str(file), "FILE")


def rows_of(name: str) -> list[Any]:
    drawn.seed(1)
    return [TABLES[name][0](number) for number in range(ROWS)]


@pytest.mark.parametrize("name", TABLES)
def test_a_public_table_is_read_or_refused_with_what_decides(name: str, tmp_path: Path) -> None:
    rows, outcomes = rows_of(name), TABLES[name][1]
    of_model = dict.fromkeys(MODELS, outcomes)
    for part in outcomes.split("; "):
        if match := re.fullmatch(r"([\w,]+): (.*)", part):
            of_model |= dict.fromkeys(match[1].split(","), match[2])
    for model, expected in of_model.items():
        if expected[:1] not in "?!":
            task, _, words = expected.partition(" | ")
            found, lines = read(tmp_path / model, rows, model)
            assert (found, words in lines) == (task, True), (model, lines)
            continue
        with pytest.raises(RecipeError) as refusal:
            read(tmp_path / model, rows, model)
        if expected[0] == "?":
            listed = re.findall(r"\n- ([\w-]+):", str(refusal.value))
            assert sorted(expected.split()[1:]) == sorted(listed), model
        else:
            for words in expected[2:].split(" & "):
                assert words in f"{refusal.value} ".replace(". ", " "), model


def test_the_refusal_of_a_table_lists_what_selects_each_task(tmp_path: Path) -> None:
    rows = rows_of("tickets")
    with pytest.raises(RecipeError) as refusal:
        read(tmp_path, rows, "masked")
    *_, classes, texts = str(refusal.value).splitlines()
    assert classes.startswith("- text-classification: ")
    assert classes.endswith(" Give label_column=queue or label_column=priority.")
    assert texts.endswith("texts, for an encoder with a masked head. Give task=masked-lm.")
    found, lines = read(tmp_path / "again", rows, "masked", "--label_column", "queue")
    assert found == "text-classification"
    assert "label column 'queue'; not read: priority" in lines
    assert read(tmp_path / "named", rows, "masked", "--task", "masked-lm")[0] == "masked-lm"


def test_label_smoothing_chooses_no_task(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"text-classification\. Give label_smoothing_factor"):
        read(tmp_path, rows_of("imdb"), "masked", "--label_smoothing", "0.1")


def test_answers_that_are_named_as_labels_leave_out_what_was_ignored(tmp_path: Path) -> None:
    rows = rows_of("Prodigy's one class")
    _, lines = read(tmp_path, rows, "encoder", "--label_column", "answer")
    assert "2 labels: accept (20 rows), reject (20 rows)" in lines
    assert "20 rows of FILE were ignored" in lines


def test_entities_are_counted_as_they_are_learned(tmp_path: Path) -> None:
    """In IOB1 an entity begins with B only where another one of its kind ends."""
    sentence = {"tokens": ["Ada", "saw", "Rome"], "ner_tags": ["I-PER", "O", "I-LOC"]}
    _, lines = read(tmp_path, [sentence] * ROWS, "encoder")
    assert "LOC (60 B, 0 I), PER (60 B, 0 I)" in lines
